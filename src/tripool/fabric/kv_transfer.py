"""KV transfer between workers: the protocols of its two ends, and the sender's slots under leases.

A slot belongs to the leases that name it, and is free again with the last of them. A slow receiver may read a slot that
has been leased again since: it finds out by the checksum of its copy.

A transfer says where the sender's blocks are (`SlotMemory`) and how they are described, and its `KvReceiver` reads that
description. Workers and router carry the descriptor and never look inside.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from tripool.cache.copying import Bytes, checksum
from tripool.messages import KvDescriptor


@dataclass(frozen=True, slots=True)
class TransferCapabilities:
    """What a transfer can do."""

    kind: str
    """Of the descriptors that its senders make and its receivers open."""
    same_host: bool
    """Only between processes of one machine."""
    in_place: bool
    """Blocks can be read as soon as they are offered; otherwise they are brought here first."""


class Transfer(Protocol):
    """A way for KV to move between workers, as one worker uses it: a prefill worker sends, a decode worker receives."""

    capabilities: TransferCapabilities

    def sender(self) -> KvSender: ...

    def receiver(self) -> KvReceiver: ...


class SlotMemory(Protocol):
    """The sender's memory: slots of equal size that receivers can reach. `cache.arena.Arena` is one."""

    slot_bytes: int
    num_slots: int

    def back(self, slot: int) -> bool:
        """Make sure that there is memory behind a slot; False when there is no more of it."""

    def view(self, slot: int, num_bytes: int) -> Bytes: ...

    def remove(self) -> None: ...


class IncomingKv(Protocol):
    """The KV of one sequence at its receiver."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def arrived(self) -> bool:
        """Whether `read` can be called without waiting."""

    def begin(self) -> None:
        """Start to bring the blocks to this machine."""

    def read(self, index: int, into: memoryview) -> memoryview | None:
        """One block, checked: copied `into` there, or where it has arrived, until `close`. None: the bytes are not
        there, or not those that were sent."""

    def num_shared(self, other: Self) -> int:
        """How many leading blocks are the same bytes as those of another that this receiver opened."""

    def close(self) -> None:
        """Nothing more is read, whether all of it was or not."""


class KvReceiver(Protocol):
    def open(self, descriptor: KvDescriptor, num_tokens: int) -> IncomingKv | None:
        """None: it is not of this transfer, or not the KV of so many tokens."""

    def close(self) -> None: ...


class _Slot(msgspec.Struct, eq=False):
    refs: int
    key: bytes | None
    checksum: int | None = None
    """None until it is filled."""


class Lease(msgspec.Struct, eq=False):
    """The KV of one sequence being copied in, or complete and waiting to be received."""

    number: int
    request_id: str
    attempt: int
    choice: int
    num_tokens: int
    slots: list[int]
    deadline_s: float
    checksums: list[int] = []
    """Of the blocks that are filled."""

    @property
    def num_filled(self) -> int:
        return len(self.checksums)

    @property
    def packed(self) -> bool:
        return len(self.checksums) == len(self.slots)


@dataclass(slots=True)
class KvSender:
    """The transfers that leave one worker. `lease` takes slots, `fill` writes, `descriptor` says where all is.

    `describe`: of slots and their checksums, for receivers of the same transfer.
    """

    memory: SlotMemory
    describe: Callable[[Sequence[int], Sequence[int]], KvDescriptor]
    leases: dict[int, Lease] = field(default_factory=dict)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _slot_of: dict[bytes, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    """A heap: low slots first, so that few pages are ever touched."""
    _next_lease: int = 1

    def __post_init__(self) -> None:
        self._free = list(range(self.memory.num_slots))

    @property
    def num_held(self) -> int:
        return len(self._slots)

    def lease(
        self,
        request_id: str,
        attempt: int,
        choice: int,
        keys: Sequence[bytes | None],
        *,
        num_tokens: int,
        deadline_s: float,
    ) -> Lease | None:
        """One slot per key; None while there are not enough. The slot of a key that is here already is shared: equal
        keys mean equal contents. A key of None is a block of this sequence alone."""
        known = [self._slot_of.get(key) if key is not None else None for key in keys]
        new = self._take(known.count(None))
        if new is None:
            return None
        slots = [self._hold(slot, key, new) for slot, key in zip(known, keys, strict=True)]
        lease = Lease(self._next_lease, request_id, attempt, choice, num_tokens, slots, deadline_s)
        self.leases[lease.number] = lease
        self._next_lease += 1
        return lease

    def fill(self, lease: Lease, write: Callable[[memoryview], None]) -> int:
        """Write its next block, unless another lease did. Returns the bytes written."""
        number = lease.slots[len(lease.checksums)]
        slot, written = self._slots[number], 0
        if slot.checksum is None:
            written = self.memory.slot_bytes
            view = self.memory.view(number, written).data
            write(view)
            slot.checksum = checksum(view)
        lease.checksums.append(slot.checksum)
        return written

    def descriptor(self, lease: Lease) -> KvDescriptor:
        return self.describe(lease.slots, lease.checksums)

    def blocks(self, lease: Lease, count: int) -> list[memoryview]:
        """The leading blocks of a lease, where they are."""
        return [self.memory.view(slot, self.memory.slot_bytes).data for slot in lease.slots[:count]]

    def release(self, number: int) -> None:
        """Unknown ones are fine: a lease may have ended by its deadline."""
        lease = self.leases.pop(number, None)
        for number in lease.slots if lease is not None else ():
            slot = self._slots[number]
            slot.refs -= 1
            if slot.refs == 0:
                del self._slots[number]
                if slot.key is not None:
                    del self._slot_of[slot.key]
                heapq.heappush(self._free, number)

    def drop(self, ends: Callable[[Lease], bool]) -> None:
        for lease in [lease for lease in self.leases.values() if ends(lease)]:
            self.release(lease.number)

    def check(self) -> None:
        """Every slot is free or held by as many leases as it says."""
        refs: dict[int, int] = {}
        for lease in self.leases.values():
            for number in lease.slots:
                refs[number] = refs.get(number, 0) + 1
        assert refs == {number: slot.refs for number, slot in self._slots.items()}, "a slot without its owners"
        assert sorted([*self._free, *self._slots]) == list(range(self.memory.num_slots)), "a slot is lost or twice"
        assert {slot.key: n for n, slot in self._slots.items() if slot.key is not None} == self._slot_of

    def close(self) -> None:
        self.memory.remove()

    def _take(self, need: int) -> Iterator[int] | None:
        """So many free slots that have memory, lowest first; None: there are not so many."""
        if need > len(self._free):
            return None
        slots = [heapq.heappop(self._free) for _ in range(need)]
        if all(map(self.memory.back, slots)):
            return iter(slots)
        for slot in slots:
            heapq.heappush(self._free, slot)
        return None

    def _hold(self, number: int | None, key: bytes | None, new: Iterator[int]) -> int:
        if number is not None:
            self._slots[number].refs += 1
            return number
        number = next(new)
        self._slots[number] = _Slot(1, key)
        if key is not None:
            self._slot_of[key] = number
        return number
