"""A prefill worker's parcels in virtual time: slots in its own arena, each free again with its lease. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.messages import KvDescriptor
from tripool.simulate.disk import Values
from tripool.simulate.model import checksum


@dataclass(frozen=True, slots=True)
class _Lease:
    request_id: str
    attempt: int
    slots: tuple[int, ...]
    deadline_s: float


class KvSender:
    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self._values: list[Values] = [()] * num_slots
        self._free = list(range(num_slots))
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self.num_to_spoil = 0
        """Parcels whose contents will change after they were summed up."""

    @property
    def num_held(self) -> int:
        return len(self._values) - len(self._free)

    def has_room(self, num_blocks: int) -> bool:
        return len(self._free) >= num_blocks

    def pack(
        self, request_id: str, attempt: int, blocks: list[Values], num_tokens: int, deadline_s: float
    ) -> KvDescriptor:
        slots = tuple(self._free.pop() for _ in blocks)
        for slot, values in zip(slots, blocks, strict=True):
            self._values[slot] = values
        if self.num_to_spoil:
            self.num_to_spoil -= 1
            self._values[slots[-1]] = tuple(value + 1 for value in blocks[-1])
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(request_id, attempt, slots, deadline_s)
        return KvDescriptor(self.name, self._last_lease, slots, tuple(map(checksum, blocks)), 1, num_tokens)

    def release(self, lease: int) -> None:
        """Unknown ones are fine."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._free.extend(held.slots)

    def cancel(self, request_id: str, attempt: int) -> None:
        for number, held in list(self._leases.items()):
            if (held.request_id, held.attempt) == (request_id, attempt):
                self.release(number)

    def expire(self, now_s: float) -> None:
        for number, held in list(self._leases.items()):
            if held.deadline_s <= now_s:
                self.release(number)

    def drop_all(self) -> None:
        for number in list(self._leases):
            self.release(number)

    def read(self, slot: int) -> Values:
        return self._values[slot]

    def check(self) -> None:
        held = [slot for lease in self._leases.values() for slot in lease.slots]
        assert sorted([*held, *self._free]) == list(range(len(self._values))), "a slot of an outbox is lost or twice"
