"""Both tiers with a made-up memory and disk, driven in any order: what is found must be what was stored last."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tripool.cache.disk_records import DiskCopy, Write
from tripool.cache.disk_tier import DiskTier
from tripool.cache.index import PoolIndex
from tripool.cache.records import Hit, Record, State, Written
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.messages import WorkerId
from tripool.simulate.disk import SimDisk, Values
from tripool.simulate.scenario import DiskSpec

from .index_model import CHAINS, SPACES, STARTS

READER, WRITER = WorkerId("d-0", 1), WorkerId("p-0", 1)
WAIT_S = 3.0


def checksum(values: Values) -> int:
    return hash(values)


class TiersMachine(RuleBasedStateMachine):
    """A block's values are its key and when it was stored. Threads are lists of jobs that are done in any order."""

    tiers_type: type[TieredIndex] = TieredIndex
    tier_type: type[DiskTier] = DiskTier

    @initialize(
        num_slots=st.integers(2, 6), num_segments=st.integers(2, 4), blocks_per_s=st.sampled_from([0.5, 3.0, 1e6])
    )
    def start(self, num_slots: int, num_segments: int, blocks_per_s: float) -> None:
        self.num_slots, self.now_s, self.epoch, self.num_stored = num_slots, 0.0, 0, 0
        self.disk = SimDisk(DiskSpec(num_segments, blocks_per_s), 2)
        self.arena: list[Values] = [()] * num_slots
        self.headers = [Record()] * num_slots
        self.purged = dict.fromkeys(SPACES, 0)
        """Blocks of a namespace that were stored before this must never be found."""
        self.void = dict.fromkeys(SPACES, 0)
        """The same, by the numbers of copies."""
        self.quotas: dict[bytes, int] = {}
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.reads: list[Read[DiskCopy]] = []
        self.writes: list[Write] = []
        self.waiting: dict[int, list[bytes]] = {}
        self.own = WorkerId("cache-0", self.epoch)
        index = PoolIndex(self.num_slots, lease_s=5.0, write_s=3.0, first_number=self.epoch * 1_000_000)
        index.restore(self.headers)
        for header in self.headers:
            if header.state is State.RESERVED and header.writer is not None and header.writer.name == "cache-0":
                index.at_rest(header.writer)
        self.tiered_index = self.tiers_type(index, self.own)
        self.tiered_index.set_quotas(self.quotas)
        whole = self.disk.new_tier()
        tier = self.tier_type(whole.num_segments, whole.segment_bytes, bytes_per_s=whole._bucket.bytes_per_s)
        tier.restore(*self.disk.found())
        self.tier: DiskTier | None = tier
        self.tiered_index.add_tier(tier)
        self.settle()

    def settle(self) -> None:
        for slot, record in self.tiered_index.take_changes():
            self.headers[slot] = Record() if record.state is State.DOOMED else replace(record)

    # ---- peers --------------------------------------------------------------------------------------------------

    @rule(space=st.sampled_from(SPACES), start=STARTS, count=st.integers(1, 5))
    def store(self, space: bytes, start: int, count: int) -> None:
        keys = CHAINS[space][start : start + count]
        grant = self.tiered_index.index.reserve(keys, WRITER, space, self.now_s, range(start, start + len(keys)))
        written = []
        for slot, position in zip(grant.slots, grant.positions, strict=True):
            self.num_stored += 1
            self.arena[slot] = (int.from_bytes(keys[position], "big"), self.num_stored)
            written.append(Written(slot, checksum(self.arena[slot]), 2))
        self.tiered_index.index.commit(grant.ticket, WRITER, written)

    @rule(space=st.sampled_from(SPACES), count=st.integers(1, 5))
    def store_for_good(self, space: bytes, count: int) -> None:
        self.store(space, 0, count)
        self.write(16)

    @rule(
        space=st.sampled_from(SPACES),
        start=STARTS,
        count=st.integers(1, 5),
        wait_s=st.sampled_from([0, WAIT_S, WAIT_S]),
    )
    def look_up(self, space: bytes, start: int, count: int, wait_s: float) -> None:
        keys = CHAINS[space][start : start + count]
        hit = self.tiered_index.lookup(keys, READER, space, self.now_s, wait_s)
        if isinstance(hit, Hit):
            self.found(keys, hit)
        else:
            assert wait_s, "nobody allowed it to wait"
            self.waiting[hit] = keys

    @rule(start=STARTS)
    def a_stolen_key_finds_nothing(self, start: int) -> None:
        mine, theirs = SPACES
        hit = self.tiered_index.lookup(CHAINS[mine][start:], READER, theirs, self.now_s, WAIT_S)
        assert isinstance(hit, Hit) and not hit.blocks, "waits for another tenant's blocks, or has them"

    def found(self, keys: list[bytes], hit: Hit) -> None:
        for key, block in zip(keys, hit.blocks, strict=False):
            values = self.arena[block.slot]
            assert values[:1] == (int.from_bytes(key, "big"),), "another block, or none"
            assert checksum(values) == block.checksum, "not what was stored"
            assert values[1] > self.purged[key[:1] * 16], "it was purged"
        self.tiered_index.index.release(hit.lease, READER)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 10))
    def give_up(self, which: int) -> None:
        number = list(self.waiting)[which % len(self.waiting)]
        del self.waiting[number]
        self.tiered_index.give_up(number)

    @rule(space=st.sampled_from(SPACES), patient=st.booleans())
    def ask_in_vain(self, space: bytes, patient: bool) -> None:
        self.look_up(space, 0, 5, WAIT_S)
        if self.waiting and patient:
            self.wait_in_vain()
        elif self.waiting:
            self.give_up(-1)

    # ---- the disk -----------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 8), last_first=st.booleans())
    def read(self, count: int, last_first: bool) -> None:
        self.reads += self.tiered_index.take_reads(self.tier) if self.tier is not None else []
        for _ in range(min(count, len(self.reads))):
            read = self.reads.pop(-1 if last_first else 0)
            record = self.tiered_index.index.records[read.slot]
            assert (record.state, record.ticket) == (State.RESERVED, read.ticket), "writes where others may read"
            self.arena[read.slot] = self.disk.get(read.copy)
            self.tiered_index.was_read(read, checksum(self.arena[read.slot]))

    @rule(count=st.integers(0, 8))
    def write(self, count: int) -> None:
        self.settle()
        self.writes += self.tier.next_writes(self.now_s) if self.tier is not None else []
        for _ in range(min(count, len(self.writes))):
            write = self.writes.pop(0)
            values = self.arena[write.slot]
            if checksum(values) == write.copy.checksum:
                self.disk.put(write.copy, values)
            if self.tier is not None:
                (self.tier.written if checksum(values) == write.copy.checksum else self.tier.failed)(write.copy.number)

    @rule(salt=st.integers(0, 8))
    def rot(self, salt: int) -> None:
        if salt < 3:
            self.disk.damage(salt)

    @rule(wait_s=st.floats(0, 2))
    def pass_time(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.tiered_index.index.expire(self.now_s)

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_in_vain(self) -> None:
        """Everybody is answered in time, whatever the disk does."""
        self.now_s += WAIT_S
        self.tiered_index.index.expire(self.now_s)
        for number, hit in self.tiered_index.answers(self.now_s):
            self.found(self.waiting.pop(number), hit)
        assert not self.waiting, "left waiting"

    @rule()
    def catch_up(self) -> None:
        """With every job done, nobody waits and nothing is held."""
        self.read(1000, False)
        self.write(1000)
        for number, hit in self.tiered_index.answers(self.now_s):
            self.found(self.waiting.pop(number), hit)
        assert not self.waiting, "left waiting"
        assert not self.tiered_index.index.num_reserved and not self.tiered_index.index.num_leases, "something is kept"

    # ---- tenants and lives --------------------------------------------------------------------------------------

    @rule(space=st.sampled_from(SPACES))
    def purge(self, space: bytes) -> None:
        self.purged[space] = self.num_stored
        self.tiered_index.purge(space)
        purges = self.tier.take_purges() if self.tier is not None else None
        self.void[space] = purges[-1].before if purges else 0
        self.disk.purge(purges)

    @precondition(lambda self: self.tiered_index._arriving)
    @rule()
    def purge_what_comes(self) -> None:
        space = next(iter(self.tiered_index._arriving.values()))
        self.purge(space)
        self.read(1000, False)
        for start in range(5):
            self.look_up(space, start, 1, 0)

    @precondition(lambda self: self.writes)
    @rule()
    def purge_what_is_written(self) -> None:
        self.purge(self.writes[0].copy.namespace)
        self.write(16)

    @rule(space=st.sampled_from(SPACES), slots=st.none() | st.integers(0, 4))
    def limit(self, space: bytes, slots: int | None) -> None:
        self.quotas.pop(space, None)
        self.quotas |= {space: slots} if slots is not None else {}
        self.tiered_index.set_quotas(self.quotas)

    @rule(kept=st.lists(st.sampled_from(["whole", "torn", "not"]), min_size=16, max_size=16))
    def die(self, kept: list[str]) -> None:
        """In the middle of everything. The next life knows every block that was on disk."""
        self.settle()
        known = self.tier.disk_copies if self.tier is not None else {}
        for write, fate in zip(self.writes, kept, strict=False):
            values = self.arena[write.slot]
            if fate == "whole" and checksum(values) == write.copy.checksum:
                self.disk.put(write.copy, values)
            elif fate == "torn":
                self.disk.tear(write.copy, values)
        self.begin()
        assert self.tier is not None
        assert known.keys() <= self.tier.disk_copies.keys() or self.tier.counters.forgotten, "lost a block"

    @rule(rarely=st.integers(0, 9))
    def disk_fails(self, rarely: int) -> None:
        if rarely:
            return
        if self.tier is not None:
            self.reads += self.tiered_index.take_reads(self.tier)
            self.tiered_index.remove_tier(self.tier)
        self.tier, self.writes = None, []

    @invariant()
    def quotas_hold(self) -> None:
        self.settle()
        self.tiered_index.check()
        for copy in self.tier.disk_copies.values() if self.tier is not None else ():
            assert self.disk.keeps(copy), "knows a block that is not on disk"
            assert copy.namespace == copy.key[:1] * 16, "in another's name"
            assert copy.number >= self.void[copy.namespace], "knows a copy that was purged"
        assert self.tiered_index.index.num_leases <= len(self.waiting), "a lease is kept"
