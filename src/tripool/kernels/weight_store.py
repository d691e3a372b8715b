"""Where a network's final tensors come from: made now, or taken from where they were kept before.

Everything that a kernel reads at each step goes through `keep`, under a label and in an order that depends on the
network's shape alone. So a shelf that wrote them down once can hand them out again, and nothing is read or packed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Protocol

import torch


class WeightStore(Protocol):
    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that `make` makes, or made once. Never changed afterwards: others may read the same memory."""
        ...


_CHUNK_BYTES = 32 * 2**20
_LINE_BYTES = 64


class LargePages:
    """Keeps nothing either, but puts everything side by side into large pages, where the system has them.

    A step reads every weight once. In pages of 4 KB even a small network's are more than a CPU remembers the addresses
    of, and looking them up took a tenth of the step.
    """

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._used = 0

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make().contiguous()
        if not made.nbytes:
            return made
        if self._used + made.nbytes > len(self._chunk):
            self._chunk, self._used = _large_pages(max(made.nbytes, _CHUNK_BYTES)), 0
        # The tensor pins the view, and the view the memory.
        place = torch.frombuffer(self._chunk, dtype=made.dtype, count=made.numel(), offset=self._used).view(made.shape)
        self._used += -(-made.nbytes // _LINE_BYTES) * _LINE_BYTES
        return place.copy_(made)


def _large_pages(num_bytes: int) -> memoryview:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # elsewhere the system decides by itself
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


class Fresh:
    """Keeps nothing."""

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


FRESH = Fresh()
