"""Read leases on slots: those granted by a look-up, and those for shared reads found in progress. Pure.

A reader may find a block by itself and increment its reader slot in the arena (see `shared_reads`). The index checks
for such readers before it evicts a block; if there is one, the slot gets a shared lease until the reader has released
it or the lease expires.

`now_s` must be monotonic: deadlines expire in the order in which they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tripool.cache.records import Record
from tripool.messages import WorkerId

_UNKNOWN = WorkerId("", 0)
"""Reader of shared leases: the arena does not tell which worker reads."""


class SharedReaders(Protocol):
    """View of the reader slots of an arena."""

    def close_if_unread(self, slot: int) -> bool:
        """Close a committed slot to new readers and return whether it is unread. If so, the caller must evict it."""

    def is_read(self, slot: int) -> bool: ...

    def evict_readers(self, slot: int) -> None:
        """Clear the reader slots of an expired lease."""


@dataclass(frozen=True, slots=True)
class Lease:
    reader: WorkerId
    deadline_s: float
    slots: tuple[int, ...]
    tickets: tuple[int, ...]
    """Ticket of each slot when it was leased: shows whether a slot was reused under its reader."""


class Leases:
    """Without `shared_readers` there are no shared reads, and so no shared leases."""

    def __init__(self, lease_s: float, shared_readers: SharedReaders | None = None) -> None:
        assert lease_s > 0
        self.now_s = 0.0
        self.readers: Counter[int] = Counter()
        """Number of leases by slot."""
        self._lease_s = lease_s
        self._shared_readers = shared_readers
        self._held: dict[int, Lease] = {}
        self._shared: dict[int, int] = {}
        """Slots under a shared lease, and the number of the lease."""

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
        """Lease these slots; `records` are those of all slots."""
        for slot in slots:
            self.readers[slot] += 1
        tickets = tuple(records[slot].ticket for slot in slots)
        self._held[number] = Lease(reader, self.now_s + self._lease_s, tuple(slots), tickets)

    def end(self, number: int) -> list[int]:
        """End a lease; returns the slots that have no lease any more, last first."""
        unread = []
        for slot in reversed(self._held.pop(number).slots):
            self.readers[slot] -= 1
            if self._shared.get(slot) == number:
                del self._shared[slot]
            if not self.readers[slot]:
                del self.readers[slot]
                unread.append(slot)
        return unread

    def overdue(self) -> Iterator[int]:
        """Numbers of expired leases, to be ended one by one. Clears the reader slots of expired shared leases."""
        while self._held and self.now_s >= next(iter(self._held.values())).deadline_s:
            number, held = next(iter(self._held.items()))
            if held.reader == _UNKNOWN and self._shared_readers is not None:
                self._shared_readers.evict_readers(held.slots[0])
            yield number

    def released(self) -> list[int]:
        """Shared leases whose slots have no reader any more."""
        if self._shared_readers is None:
            return []
        return [number for slot, number in self._shared.items() if not self._shared_readers.is_read(slot)]

    def close_if_unread(self, slot: int) -> bool:
        """Whether a committed slot is unread. If so the caller must evict it, else take a shared lease."""
        readers = self._shared_readers
        return slot not in self._shared and (readers is None or readers.close_if_unread(slot))

    def check(self) -> None:
        assert Counter(slot for held in self._held.values() for slot in held.slots) == self.readers, "miscounted"
        for slot, number in self._shared.items():
            assert self._held[number].slots == (slot,), f"slot {slot} has a shared lease that does not exist"

    def take_shared(self, number: int, slot: int, records: Sequence[Record]) -> None:
        if slot not in self._shared:
            self.take(number, [slot], records, _UNKNOWN)
            self._shared[slot] = number
