"""The cache pool in virtual time: the real index over an arena of made-up KV, and a worker's way of using it. Pure.

Workers write into the arena themselves, in two pieces with a turn between them: whoever is stopped there wakes up in
the middle of a write. The arena outlives its member; the index is restored from what the slots' headers say. So does
the disk behind it, where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tripool.cache import PoolIndex, namespace_tag, stretches
from tripool.cache.disk_records import DiskCopy, DiskCounters, Write
from tripool.cache.records import Block, Hit, Record, State, Written
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.core import Request
from tripool.messages import WorkerId
from tripool.simulate.disk import DiskSpec, SimDisk, Values
from tripool.simulate.model import BLOCK_TOKENS, checksum

LEASE_S = 0.5
WRITE_S = 0.3
WAIT_S = 0.15
"""For blocks that come from disk."""


class CacheMember:
    def __init__(self, num_slots: int, name: str, disk: DiskSpec | None = None) -> None:
        self._num_slots, self._name = num_slots, name
        self._disk = SimDisk(disk, BLOCK_TOKENS) if disk is not None else None
        self._headers = [Record()] * num_slots
        self._arena: list[list[int]] = [[] for _ in range(num_slots)]
        self.epoch = 0
        self.answered: dict[int, Hit] = {}
        """Look-ups that waited for the disk."""
        self.seen: Counter[str] = Counter()
        self._writing: dict[int, tuple[Write, Values]] = {}
        self._acknowledged: Mapping[bytes, DiskCopy] = {}
        self._start(PoolIndex(num_slots, lease_s=LEASE_S, write_s=WRITE_S))

    def _start(self, index: PoolIndex) -> None:
        self.epoch += 1
        self._own = WorkerId(self._name, self.epoch)
        self.index, self.tiered_index = index, TieredIndex(index, self._own)
        self.answered = {}
        if self._disk is not None:
            self._disk.is_full = False
            self.tiered_index.open_disk(self._disk.new_tier(), *self._disk.found())
        self.up = True
        self.settle()

    def fall(self) -> None:
        """Killed. What it was writing to disk is there or is not; some of it is there in name only."""
        self.up = False
        self._acknowledged = {}
        if self._disk is None:
            return
        if self.tiered_index.disk is None:  # it was full and given up before: what was under way ends all the same
            self._disk.crash()
            self._writing = {}
            return
        self.remember()
        self._disk.crash()
        for write, values in self._writing.values():
            if write.copy.number % 3 == 0:
                self._disk.put(write.copy, values)
            elif write.copy.number % 3 == 1:
                self._disk.tear(write.copy, values)
                self.seen["blocks torn on disk"] += 1
        self._acknowledged = self.tiered_index.disk.disk_copies
        self._writing = {}

    def restart(self) -> None:
        """A new life over the same arena and disk."""
        first = 1 + max([header.ticket for header in self._headers], default=0) + 1_000_000
        index = PoolIndex(self._num_slots, lease_s=LEASE_S, write_s=WRITE_S, first_number=first)
        index.restore(self._headers)
        for header in self._headers:
            if header.state is State.RESERVED and header.writer is not None and header.writer.name == self._name:
                index.at_rest(header.writer)  # what an earlier life was reading from disk
        self._start(index)
        if self.tiered_index.disk is not None:
            lost = self._acknowledged.keys() - self.tiered_index.disk.disk_copies.keys()
            assert not lost, f"{len(lost)} blocks that were on disk are gone"
            self.seen["blocks found on disk"] += self.tiered_index.disk.num_disk_copies

    def settle(self) -> None:
        """Headers say what the index has decided, before anyone hears of it."""
        for slot, record in self.tiered_index.take_changes():
            self._headers[slot] = record

    def check(self) -> None:
        self.tiered_index.check()
        if self._disk is not None and self.tiered_index.disk is not None:
            for copy in self.tiered_index.disk.disk_copies.values():
                assert self._disk.keeps(copy), "the index knows a block that is not on disk"

    # ---- the disk -----------------------------------------------------------------------------------------------

    def turn(self, now_s: float) -> None:
        """What the member's threads and loop do, as far as their time has come."""
        if self._disk is None or not self.up:
            return
        self._disk.turn(now_s)
        for read in self.tiered_index.take_reads():
            self._fill(read, self._disk.get(read.copy)[:1])
            self._disk.later(now_s, read.slot, partial(self._read, read))
        for write in self.tiered_index.take_writes(now_s):
            self._writing[write.copy.number] = write, tuple(self._arena[write.slot])
            self._disk.later(now_s, write.slot, partial(self._wrote, write.copy.number))
        self.answered |= self.tiered_index.answers(now_s)
        self.settle()

    def _fill(self, read: Read, values: Values) -> None:
        self.clear(read.slot)
        self.write(read.slot, read.ticket, self._own, values)

    def _read(self, read: Read) -> None:
        assert self._disk is not None
        self._fill(read, self._disk.get(read.copy))
        self.tiered_index.was_read(read, checksum(self.read(read.slot)))
        self.settle()

    def _wrote(self, number: int) -> None:
        assert self._disk is not None
        write, values = self._writing.pop(number)
        if self._disk.is_full:
            self.close_disk()
        elif checksum(values) == write.copy.checksum:
            self._disk.put(write.copy, values)
            self.tiered_index.wrote(write, True)
        else:
            self.seen["slots reused before they were copied"] += 1
            self.tiered_index.wrote(write, False)

    def purge(self, namespace: str) -> None:
        """Forget a tenant, in this life and in later ones."""
        tag = namespace_tag(namespace)
        _, purge = self.tiered_index.purge(tag)
        if self._disk is not None:
            self._disk.purge(purge)
        self.settle()
        found = [record for record in self.index.records if record.state is State.COMMITTED and record.namespace == tag]
        left = (
            []
            if self.tiered_index.disk is None
            else [c for c in self.tiered_index.disk.disk_copies.values() if c.namespace == tag]
        )
        assert not found and not left, "a purged block can be found"

    def rot(self, salt: int) -> None:
        """Some blocks on disk are not what they were."""
        if self._disk is not None:
            self.seen["blocks rotten on disk"] += self._disk.damage(salt)

    def fill_disk(self) -> None:
        """Nothing more can be written, until the next life makes room."""
        if self._disk is not None:
            self._disk.is_full = True

    def close_disk(self) -> None:
        self.remember()
        self.seen["disks switched off"] += self.tiered_index.disk is not None
        self.tiered_index.close_disk()

    def remember(self) -> None:
        """Before this life's books are closed."""
        if self.tiered_index.disk is not None:
            told, self.tiered_index.disk.counters = self.tiered_index.disk.counters, DiskCounters()
            self.seen["blocks read from disk"] += told.promoted
            self.seen["blocks written to disk"] += told.written
            self.seen["bad blocks on disk"] += told.bad

    # ---- the arena ----------------------------------------------------------------------------------------------

    def write(self, slot: int, ticket: int, writer: WorkerId, values: Sequence[int]) -> None:
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
    leases: list[int]
    blocks: list[Block]
    epoch: int
    waits: int = 0
    """Number of the look-up that waits for the disk."""


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

    worker_id: WorkerId
    members: list[CacheMember]
    writes: list[_Write] = field(default_factory=list)
    num_stored: int = 0
    num_fetched: int = 0
    num_bad: int = 0
    num_waited: int = 0

    def find(self, keys: Sequence[bytes], request: Request, now_s: float) -> Fetch | None:
        member = self._owner(keys)
        fetch = Fetch(member, [], [], member.epoch)
        for namespace, first, stop in _stretches(request, len(keys)):
            if member.up and not fetch.waits and len(fetch.blocks) == first:
                hit = member.tiered_index.lookup(
                    keys[first:stop], self.worker_id, namespace_tag(namespace), now_s, WAIT_S
                )
                if isinstance(hit, Hit):
                    fetch.leases.append(hit.lease)
                    fetch.blocks.extend(hit.blocks)
                else:
                    fetch.waits = hit
                member.settle()
                member.turn(now_s)
        return fetch if fetch.blocks or fetch.waits else None

    def is_ready(self, fetch: Fetch, now_s: float) -> bool:
        """Whether a prefix can be copied: what waited for the disk has come, or does not come any more."""
        member = fetch.member
        member.turn(now_s)
        if fetch.waits and (member.epoch, member.up) == (fetch.epoch, True):
            hit = member.answered.pop(fetch.waits, None)
            if hit is None:
                return False
            fetch.leases.append(hit.lease)
            fetch.blocks.extend(hit.blocks)
            self.num_waited += 1
        fetch.waits = 0
        return True

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
            if fetch.waits and fetch.member.epoch == fetch.epoch:
                fetch.member.tiered_index.give_up(fetch.waits)
            for lease in fetch.leases:
                fetch.member.index.release(lease, self.worker_id, bad)
            fetch.member.settle()

    def store(self, keys: Sequence[bytes], blocks: list[Values], request: Request, now_s: float) -> None:
        member = self._owner(keys)
        for namespace, first, stop in _stretches(request, len(keys)):
            if not member.up or len(self.writes) >= 4:
                return
            grant = member.index.reserve(
                keys[first:stop], self.worker_id, namespace_tag(namespace), now_s, range(first, stop)
            )
            member.settle()
            if grant.ticket:
                wanted = [blocks[first + position] for position in grant.positions]
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
                    write.member.write(slot, write.ticket, self.worker_id, piece)
                write.num_pieces += 1
            if write.num_pieces == 2 and write.member.up:
                told = zip(write.slots, write.blocks, strict=True)
                written = [Written(slot, checksum(values), len(values)) for slot, values in told]
                self.num_stored += write.member.index.commit(write.ticket, self.worker_id, written)
                write.member.settle()
                self.writes.remove(write)

    def _owner(self, keys: Sequence[bytes]) -> CacheMember:
        return self.members[keys[0][0] % len(self.members)]


def _stretches(request: Request, num_blocks: int) -> list[tuple[str, int, int]]:
    return stretches(request.namespace, request.public_tokens // BLOCK_TOKENS, num_blocks)
