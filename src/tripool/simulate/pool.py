"""The cache pool in virtual time: the real index over an arena of made-up KV, and a worker's way of using it. Pure.

Workers write into the arena themselves, in two pieces with a turn between them: whoever is stopped there wakes up in
the middle of a write. The arena outlives its member; the index is restored from what the slots' headers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tripool.cache import PoolIndex, namespace_tag
from tripool.cache.records import Block, Record, State, Written
from tripool.messages import Life
from tripool.simulate.model import checksum

LEASE_S = 0.5
WRITE_S = 0.3

Values = tuple[int, ...]


class CacheMember:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._headers = [Record()] * num_slots
        self._arena: list[list[int]] = [[] for _ in range(num_slots)]
        self.index = PoolIndex(num_slots, lease_s=LEASE_S, write_s=WRITE_S)
        self.up = True

    def restart(self) -> None:
        """A new life over the same arena."""
        first = 1 + max([header.ticket for header in self._headers], default=0) + 1_000_000
        self.index = PoolIndex(self._num_slots, lease_s=LEASE_S, write_s=WRITE_S, first_number=first)
        self.index.restore(self._headers)
        self.up = True
        self.settle()

    def settle(self) -> None:
        """Headers say what the index has decided, before anyone hears of it."""
        for slot, record in self.index.take_changes():
            self._headers[slot] = record

    def write(self, slot: int, ticket: int, writer: Life, values: Sequence[int]) -> None:
        """One piece of a block, by a worker that was given this slot, perhaps long ago."""
        header = self._headers[slot]
        own = (header.state, header.ticket, header.writer) == (State.RESERVED, ticket, writer)
        assert own, f"{writer} writes where others may read: slot {slot} is {header.state.name} of {header.writer}"
        self._arena[slot].extend(values)

    def clear(self, slot: int) -> None:
        self._arena[slot] = []

    def read(self, slot: int) -> Values:
        return tuple(self._arena[slot])


@dataclass(slots=True)
class Fetch:
    """A prefix that was found, before it is copied."""

    member: CacheMember
    lease: int
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class _Write:
    member: CacheMember
    ticket: int
    slots: tuple[int, ...]
    blocks: list[Values]
    num_pieces: int = 0


@dataclass(slots=True)
class PoolClient:
    """What one life of a worker has under way with the pool."""

    life: Life
    members: list[CacheMember]
    writes: list[_Write] = field(default_factory=list)
    num_stored: int = 0
    num_fetched: int = 0
    num_bad: int = 0

    def find(self, keys: Sequence[bytes], namespace: str, now_s: float) -> Fetch | None:
        member = self._owner(keys)
        if not member.up:
            return None
        hit = member.index.lookup(keys, self.life, namespace_tag(namespace), now_s)
        member.settle()
        return Fetch(member, hit.lease, hit.blocks) if hit.blocks else None

    def copy(self, fetch: Fetch) -> list[Values]:
        """The leading blocks that are what their checksum says; the lease may have ended while we were stopped."""
        found: list[Values] = []
        bad: list[int] = []
        for block in fetch.blocks:
            values = fetch.member.read(block.slot)
            if checksum(values) != block.checksum:
                bad.append(block.slot)
                break
            found.append(values)
        self.num_bad += len(bad)
        self.num_fetched += len(found)
        self.let_go(fetch, bad)
        return found

    def let_go(self, fetch: Fetch, bad: Sequence[int] = ()) -> None:
        if fetch.member.up:
            fetch.member.index.release(fetch.lease, self.life, bad)
            fetch.member.settle()

    def store(self, keys: Sequence[bytes], blocks: list[Values], namespace: str, now_s: float) -> None:
        member = self._owner(keys)
        if not member.up or len(self.writes) >= 4:
            return
        grant = member.index.reserve(keys, self.life, namespace_tag(namespace), now_s)
        member.settle()
        if grant.ticket:
            wanted = [blocks[position] for position in grant.positions]
            self.writes.append(_Write(member, grant.ticket, grant.slots, wanted))

    def turn(self) -> None:
        """One more piece of every write; a commit waits until its member is there to hear it."""
        for write in list(self.writes):
            if write.num_pieces < 2:
                for slot, values in zip(write.slots, write.blocks, strict=True):
                    half = len(values) // 2
                    if write.num_pieces == 0:
                        write.member.clear(slot)
                    piece = values[half:] if write.num_pieces else values[:half]
                    write.member.write(slot, write.ticket, self.life, piece)
                write.num_pieces += 1
            if write.num_pieces == 2 and write.member.up:
                told = zip(write.slots, write.blocks, strict=True)
                written = [Written(slot, checksum(values), len(values)) for slot, values in told]
                self.num_stored += write.member.index.commit(write.ticket, self.life, written)
                write.member.settle()
                self.writes.remove(write)

    def _owner(self, keys: Sequence[bytes]) -> CacheMember:
        return self.members[keys[0][0] % len(self.members)]
