"""The protocol of a cache tier: which blocks it holds, for whom, and what it evicts. Keys and sizes, never bytes. Pure.

Memory (`PoolIndex`) is the first tier: only blocks in memory are leased to readers. A backing tier, such as the disk
(`DiskTier`), keeps copies of what memory evicts. `TieredIndex` searches them in order and moves blocks up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from tripool.cache.records import Record, StoredBlock


class CacheTier(Protocol):
    capacity: int
    """In slots or bytes: the unit of its quotas."""

    @property
    def next_deadline_s(self) -> float | None:
        """When it has something to do, if nothing else happens."""

    def purge(self, namespace: bytes) -> int:
        """Evict a namespace; returns how many of its blocks were in this tier and in no faster one."""

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        """Replace all quotas and evict what exceeds them; returns the number of evicted blocks."""

    def check(self) -> None:
        """Raise if an invariant is broken."""


BlockT = TypeVar("BlockT", bound=StoredBlock)


class BackingTier(CacheTier, Protocol[BlockT]):
    """A tier behind memory. What moves its bytes decides when to write; `TieredIndex` decides what is read."""

    def see(self, changes: Iterable[tuple[int, Record]]) -> None:
        """Slots of memory that have changed."""

    def find(self, key: bytes, namespace: bytes) -> BlockT | None: ...

    def was_read(self, block: BlockT, intact: bool) -> None:
        """Result of reading a block back."""
