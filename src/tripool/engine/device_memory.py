"""Memory of a CUDA device as it is measured: how much is free, what a step takes, and the error when it runs out."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tripool.engine.memory import DeviceBytes, refused

_TRIED = re.compile(r"Tried to allocate ([0-9.]+) ([KMG]?)i?B")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
"""Of errors that libraries raise: graphs, cuBLAS, the driver."""


def device_bytes(device: torch.device) -> DeviceBytes:
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceBytes(free + held, total)


@contextmanager
def within_memory(what: str, device: torch.device, needed_bytes: int | None = None) -> Iterator[None]:
    """Out of memory inside becomes `DeviceOutOfMemory`. `needed_bytes`: of all that is done inside, if known."""
    try:
        yield
    except RuntimeError as error:
        failed = _out_of_memory(error)
        if failed is None:
            raise
        try:
            memory = device_bytes(device)
            torch.cuda.empty_cache()
        except RuntimeError:  # not even the device could be opened
            memory = DeviceBytes(0, 0)
        raise refused(what, needed_bytes or _tried_bytes(failed), memory) from error


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error itself, or the one that it followed: ending a capture that failed may raise another one."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS):
            return error
        error = error.__cause__ or error.__context__
    return None


def _tried_bytes(error: BaseException) -> int:
    found = _TRIED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def measured_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Device memory that `run` takes at its highest, with all that torch, graphs and libraries hold for it. It is free
    again afterwards."""
    give_back()
    free = torch.cuda.mem_get_info(device)[0]
    run()
    torch.cuda.synchronize(device)
    left = torch.cuda.mem_get_info(device)[0]  # torch gives nothing back by itself, so this is the highest use
    give_back()
    return max(0, free - left)


def give_back() -> None:
    """Release what torch holds without using it."""
    gc.collect()  # captured steps refer to their runner
    torch.cuda.empty_cache()
