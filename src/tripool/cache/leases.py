"""Who reads which slots, and until when: those who asked, and those who were seen. Pure.

Readers may find a block by themselves and sit down at its slot. They are seen only when someone looks, and an index
looks before it lets a block go: who sits there then has a lease by sight, until they have risen or its time is over.

Deadlines are met in the order in which they were given: `now_s` must never go back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tripool.cache.records import Record
from tripool.messages import WorkerId

_SEEN = WorkerId("", 0)
"""In whose name leases by sight are: who it is cannot be seen."""


class SharedReaders(Protocol):
    """Those who do not ask."""

    def close_if_unread(self, slot: int) -> bool:
        """Whether nobody reads a committed slot. If so nobody begins to any more: the slot must be forgotten."""

    def is_read(self, slot: int) -> bool: ...

    def evict_readers(self, slot: int) -> None:
        """Their time is over."""


class NoSharedReaders:
    """Everybody asks."""

    def close_if_unread(self, slot: int) -> bool:
        return True

    def is_read(self, slot: int) -> bool:
        return False

    def evict_readers(self, slot: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Lease:
    reader: WorkerId
    deadline_s: float
    slots: tuple[int, ...]
    tickets: tuple[int, ...]
    """Of each slot when it was leased: shows whether a slot was reused under its reader."""


class Leases:
    def __init__(self, lease_s: float, shared_readers: SharedReaders | None = None) -> None:
        assert lease_s > 0
        self.now_s = 0.0
        self.readers: Counter[int] = Counter()
        """By slot."""
        self._lease_s = lease_s
        self._shared_readers = shared_readers or NoSharedReaders()
        self._held: dict[int, Lease] = {}
        self._sighted: dict[int, int] = {}
        """Slots under a lease by sight, and its number."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, number: int) -> Lease | None:
        return self._held.get(number)

    def of(self, reader: WorkerId) -> list[int]:
        return [number for number, held in self._held.items() if held.reader == reader]

    @property
    def all(self) -> Sequence[Lease]:
        return list(self._held.values())

    @property
    def next_deadline_s(self) -> float | None:
        first = next(iter(self._held.values()), None)
        return None if first is None else first.deadline_s

    def take(self, number: int, slots: Sequence[int], records: Sequence[Record], reader: WorkerId) -> None:
        """`records`: of all slots."""
        for slot in slots:
            self.readers[slot] += 1
        tickets = tuple(records[slot].ticket for slot in slots)
        self._held[number] = Lease(reader, self.now_s + self._lease_s, tuple(slots), tickets)

    def end(self, number: int) -> list[int]:
        """The slots, last first, that nobody reads any more."""
        unread = []
        for slot in reversed(self._held.pop(number).slots):
            self.readers[slot] -= 1
            if self._sighted.get(slot) == number:
                del self._sighted[slot]
            if not self.readers[slot]:
                del self.readers[slot]
                unread.append(slot)
        return unread

    def overdue(self) -> Iterator[int]:
        """Numbers to be ended one by one. Who is still there is turned out."""
        while self._held and self.now_s >= next(iter(self._held.values())).deadline_s:
            number, held = next(iter(self._held.items()))
            if held.reader == _SEEN:
                self._shared_readers.evict_readers(held.slots[0])
            yield number

    def released(self) -> list[int]:
        """Leases by sight of slots at which nobody sits any more."""
        return [number for slot, number in self._sighted.items() if not self._shared_readers.is_read(slot)]

    def sees_nobody(self, slot: int) -> bool:
        """At a committed slot. If so it must be let go; else it is to be leased by sight."""
        return slot not in self._sighted and self._shared_readers.close_if_unread(slot)

    def check(self) -> None:
        assert Counter(slot for held in self._held.values() for slot in held.slots) == self.readers, "miscounted"
        for slot, number in self._sighted.items():
            assert self._held[number].slots == (slot,), f"slot {slot} is leased by sight to nobody"

    def sight(self, number: int, slot: int, records: Sequence[Record]) -> None:
        if slot not in self._sighted:
            self.take(number, [slot], records, _SEEN)
            self._sighted[slot] = number
