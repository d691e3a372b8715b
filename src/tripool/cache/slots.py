"""The slots of one arena: what each is, which are free, and which unread block was used longest ago. Pure.

Knows no leases, deadlines or lives: the index decides, and this keeps the books.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from tripool.cache.records import Record, State

_FREE = Record()


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.records = [_FREE] * num_slots
        self._free: dict[int, None] = dict.fromkeys(range(num_slots))
        """In order of giving out."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_in: dict[bytes, OrderedDict[int, None]] = {}
        self._held: Counter[bytes] = Counter()
        self._changed: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> dict[bytes, int]:
        """Slots that are not free, by namespace."""
        return dict(self._held)

    def held_by(self, namespace: bytes) -> int:
        return self._held[namespace]

    def fill(self, slot: int, record: Record) -> None:
        """Give a free slot to someone."""
        assert record.state is not State.FREE
        del self._free[slot]
        self._held[record.namespace] += 1
        self.change(slot, record)

    def first_free(self) -> int:
        slot: int = next(iter(self._free))
        return slot

    def change(self, slot: int, record: Record) -> None:
        """A new state of a slot that stays in the same hands."""
        assert record.state is not State.FREE and slot not in self._free
        self.records[slot] = record
        self._changed[slot] = None

    def drop(self, slot: int) -> None:
        assert slot not in self._idle
        namespace = self.records[slot].namespace
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        self._free[slot] = None
        self.records[slot] = _FREE
        self._changed[slot] = None

    def enter_idle(self, slot: int) -> None:
        """Unread from now on, and used just now."""
        self._idle[slot] = None
        self._idle_in.setdefault(self.records[slot].namespace, OrderedDict())[slot] = None

    def leave_idle(self, slot: int) -> None:
        namespace = self.records[slot].namespace
        del self._idle[slot]
        del self._idle_in[namespace][slot]
        if not self._idle_in[namespace]:
            del self._idle_in[namespace]

    def is_idle(self, slot: int) -> bool:
        return slot in self._idle

    def oldest_idle(self, namespace: bytes | None = None) -> int | None:
        """Used longest ago: of all, or of one namespace."""
        idle = self._idle if namespace is None else self._idle_in.get(namespace)
        return next(iter(idle), None) if idle else None

    def take_changes(self) -> list[tuple[int, Record]]:
        changed = [(slot, self.records[slot]) for slot in self._changed]
        self._changed.clear()
        return changed

    def check(self) -> None:
        for slot, record in enumerate(self.records):
            assert (record.state is State.FREE) == (slot in self._free), f"slot {slot} is {record.state.name}"
            assert record.state is State.COMMITTED or slot not in self._idle, f"idle slot {slot} is not committed"
        held = Counter(record.namespace for record in self.records if record.state is not State.FREE)
        assert held == self._held, "namespaces are miscounted"
        by_namespace: dict[bytes, list[int]] = {}
        for slot in self._idle:
            by_namespace.setdefault(self.records[slot].namespace, []).append(slot)
        assert {name: list(slots) for name, slots in self._idle_in.items()} == by_namespace, "idle slots disagree"
