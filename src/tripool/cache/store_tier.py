"""Policy of a shared store behind memory: what is written through to it, and what is looked for there. Pure.

Other servers write to the same store, and it evicts by itself. So what it holds is not known here: any block may be
there, and is asked for by its key. What is known to be there is not written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tripool.cache.records import Record, State, StoredBlock

_UNKNOWN = -1
_MOST_WRITING = 16
_MOST_KNOWN = 65_536
_REST_S = 10.0
"""After a failure nothing is asked of the store for so long."""


@dataclass(frozen=True, slots=True)
class StoreCopy(StoredBlock):
    """A block that may be in the store. All but its name is known once it was read."""


@dataclass(slots=True)
class StoreCounters:
    written: int = 0
    read: int = 0
    absent: int = 0
    """Asked for, and not there."""
    bad: int = 0
    lost: int = 0
    """Evicted from memory before they were written."""
    failures: int = 0
    """Of the store itself."""


@dataclass(slots=True)
class StoreWrite:
    slot: int
    record: Record


class StoreTier:
    """`BackingTier` in a store that others share. `capacity` as memory's: its quotas are those of the store."""

    next_deadline_s = None

    def __init__(self, capacity: int) -> None:
        self.capacity, self.counters = capacity, StoreCounters()
        self._pending: OrderedDict[bytes, StoreWrite] = OrderedDict()
        self._slots: dict[int, bytes] = {}
        """Of pending blocks."""
        self._writing: dict[bytes, Record] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Keys of blocks in memory or lately there that the store has."""
        self._rests_until_s, self._now_s = 0.0, 0.0

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._writing)

    def purge(self, namespace: bytes) -> int:
        """What the store holds of it is removed by the object that moves its bytes, `MooncakeIo`."""
        for key in [key for key, write in self._pending.items() if write.record.namespace == namespace]:
            self._drop(key)
        self._known.clear()
        return 0

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        return 0

    def see(self, changes: Iterable[tuple[int, Record]]) -> None:
        for slot, record in changes:
            before = self._slots.get(slot)
            if before is not None and (record.state is not State.COMMITTED or record.key != before):
                self._drop(before)
                self.counters.lost += 1
            wanted = record.state is State.COMMITTED and record.key not in self._known
            if wanted and record.key not in self._writing and record.key not in self._pending:
                self._pending[record.key] = StoreWrite(slot, record)
                self._slots[slot] = record.key

    def find(self, key: bytes, namespace: bytes) -> StoreCopy | None:
        return None if self._now_s < self._rests_until_s else StoreCopy(key, namespace, 0, _UNKNOWN, 0, 0)

    def was_read(self, block: StoreCopy, intact: bool) -> None:
        if block.checksum == _UNKNOWN:
            self.counters.absent += 1
        elif intact:
            self.counters.read += 1
            self._know(block.key)
        else:
            self.counters.bad += 1

    def next_writes(self, now_s: float) -> list[StoreWrite]:
        """Writes to start now, oldest first. Each must be answered by `written`."""
        self._now_s = now_s
        writes: list[StoreWrite] = []
        while self._pending and len(self._writing) < _MOST_WRITING and now_s >= self._rests_until_s:
            key, write = next(iter(self._pending.items()))
            self._drop(key)
            self._writing[key] = write.record
            writes.append(write)
        return writes

    def written(self, key: bytes, good: bool) -> None:
        """Not good: the block was evicted meanwhile."""
        del self._writing[key]
        if good:
            self.counters.written += 1
            self._know(key)
        else:
            self.counters.lost += 1

    def failed(self) -> None:
        """The store did not answer, or refused."""
        self.counters.failures += 1
        self._rests_until_s = self._now_s + _REST_S

    def check(self) -> None:
        assert {slot: key for key, write in self._pending.items() for slot in [write.slot]} == self._slots
        assert not self._pending.keys() & self._writing.keys(), "written twice"
        assert len(self._writing) <= _MOST_WRITING and len(self._known) <= _MOST_KNOWN

    def _drop(self, key: bytes) -> None:
        write = self._pending.pop(key)
        del self._slots[write.slot]

    def _know(self, key: bytes) -> None:
        self._known[key] = None
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
