"""A kernel that sits on some multiprocessors and does nothing, so that what runs meanwhile has the others only.

Stands in for an exchange that works while experts compute. Each block asks for all of a multiprocessor's shared memory,
so no block that uses any can join it. It ends when told, or after a bounded time of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CODE = r"""
extern "C" __global__ void sit(volatile int* stop, int* here, long long most) {
    if (threadIdx.x == 0) {
        atomicAdd(here, 1);
        for (long long i = 0; i < most && !*stop; i++) __nanosleep(1000);
    }
}
"""
SHARED_BYTES = 227 * 1024
MOST_S = 20.0
SEATED_WITHIN_S = 10.0


class Unavailable(Exception):
    """Nothing here can build or seat the kernel; the message says why."""


class Resident:
    def __init__(self, count: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise Unavailable(f"no cupy: {error}") from error
        self._cupy, self.count = cupy, count
        self._kernel = cupy.RawKernel(CODE, "sit")
        self._kernel.max_dynamic_shared_size_bytes = SHARED_BYTES
        self._stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._here = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()

    @contextmanager
    def seated(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self._stop.zero_()
        self._here.zero_()
        torch.cuda.synchronize()
        most = int(MOST_S * 1e6)
        with self._cupy.cuda.ExternalStream(self._stream.cuda_stream):
            pointers = (self._stop.data_ptr(), self._here.data_ptr(), self._cupy.int64(most))
            self._kernel((self.count,), (32,), pointers, shared_mem=SHARED_BYTES)
        deadline = time.monotonic() + SEATED_WITHIN_S
        while int(self._here) < self.count:
            if time.monotonic() > deadline:
                raise Unavailable(f"only {int(self._here)} of {self.count} blocks came to sit")
        try:
            yield
        finally:
            self._stop.fill_(1)
            torch.cuda.synchronize()
