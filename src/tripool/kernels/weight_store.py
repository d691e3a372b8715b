"""Weight stores: where packed tensors come from, newly made or from the weight cache.

Everything that a kernel reads at each step goes through `keep`, under a label and in an order that depend only on the
network's shape. So a store that recorded the tensors once can return them again without reading or packing anything.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Protocol

import torch


class WeightStore(Protocol):
    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that `make` returns, or an earlier one. It is never changed afterwards: processes may
        share the memory.
        """
        ...


_CHUNK_BYTES = 32 * 2**20
_LINE_BYTES = 64


class LargePages:
    """Stores nothing, but places all tensors side by side in huge pages, where the system has them.

    A step reads every weight once. With 4 KB pages even a small network exceeds the TLB, and page walks took a tenth of
    the step.
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
        # The tensor keeps the view alive, and the view the memory.
        target = torch.frombuffer(self._chunk, dtype=made.dtype, count=made.numel(), offset=self._used).view(made.shape)
        self._used += -(-made.nbytes // _LINE_BYTES) * _LINE_BYTES
        return target.copy_(made)


def _large_pages(num_bytes: int) -> memoryview:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # not available on all systems
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def decided(store: WeightStore, label: str, decide: Callable[[], bool]) -> bool:
    """What `decide` returns, or an earlier result. For choices that depend on a weight's values: a store that has the
    packed tensors does not read those."""
    made: list[bool] = []

    def flag() -> torch.Tensor:
        made.append(decide())
        return torch.tensor(made, dtype=torch.uint8)

    kept = store.keep(label, flag)
    return made[0] if made else bool(kept)


class Fresh:
    """Stores nothing."""

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


FRESH = Fresh()
