"""Slot table of one arena: the record of each slot, the free list and the eviction order. Pure.

Leases, deadlines and workers are in the index, which makes the decisions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from tripool.cache.eviction import CostAware
from tripool.cache.records import Record, State

_FREE = Record()


class SlotTable:
    def __init__(self, num_slots: int, order: CostAware) -> None:
        assert num_slots > 0
        self.idle = order
        """Committed slots that are not read, in the order of their eviction."""
        self.records = [_FREE] * num_slots
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        """In order of allocation. Popping from the front of a plain dict would scan all entries removed before."""
        self._held: Counter[bytes] = Counter()
        self._changed: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> dict[bytes, int]:
        """Number of slots in use, by namespace."""
        return dict(self._held)

    def held_by(self, namespace: bytes) -> int:
        return self._held[namespace]

    def fill(self, slot: int, record: Record) -> None:
        """Take a slot from the free list."""
        assert record.state is not State.FREE
        del self._free[slot]
        self._held[record.namespace] += 1
        self.change(slot, record)

    def first_free(self) -> int:
        slot: int = next(iter(self._free))
        return slot

    def change(self, slot: int, record: Record) -> None:
        """Update the record of a slot in use."""
        assert record.state is not State.FREE and slot not in self._free
        self.records[slot] = record
        self._changed[slot] = None

    def drop(self, slot: int) -> None:
        self.idle.forget(slot)
        namespace = self.records[slot].namespace
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        self._free[slot] = None
        self.records[slot] = _FREE
        self._changed[slot] = None

    def enter_idle(self, tail_first: Sequence[int]) -> None:
        """Slots that were used together are unread from now on."""
        self.idle.enter((slot, self.records[slot]) for slot in tail_first)

    def take_changes(self) -> list[tuple[int, Record]]:
        if not self._changed:
            return []
        changed = [(slot, self.records[slot]) for slot in self._changed]
        self._changed.clear()
        return changed

    def check(self) -> None:
        free, held = State.FREE, Counter[bytes]()
        for slot, record in enumerate(self.records):
            assert (record.state is free) == (slot in self._free), f"slot {slot} is {record.state.name}"
            if record.state is not free:
                held[record.namespace] += 1
        assert held == self._held, "namespaces are miscounted"
        self.idle.check({slot: self.records[slot] for slot in self.idle})
