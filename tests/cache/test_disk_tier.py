"""The tiers' rules in any order of events, bugs that must not survive that, and single rules that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tripool.cache.disk_records import PAGE, DiskCopy, Purge, Segment, Write, footprint
from tripool.cache.disk_tier import DiskTier
from tripool.cache.index import PoolIndex
from tripool.cache.records import Hit, Record, State, StoredBlock, Written
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.messages import WorkerId

from .index_model import CHAINS, SPACES
from .test_index import HUNT, SUITE
from .tiers_model import TiersMachine

MINE, THEIRS = SPACES
WRITER, READER = WorkerId("w-0", 1), WorkerId("r-0", 1)
BLOCK = footprint(1)


def test_any_order_of_events_keeps_the_rules() -> None:
    run_state_machine_as_test(TiersMachine, settings=SUITE)


@pytest.mark.prove
def test_any_order_of_many_more_events_keeps_the_rules() -> None:
    from hypothesis import settings

    run_state_machine_as_test(TiersMachine, settings=settings(SUITE, max_examples=3000, stateful_step_count=100))


# ---- planted bugs ------------------------------------------------------------------------------------------------


class BelievesTheDisk(TieredIndex):
    def was_read(self, read: Read[Any], checksum: int | None) -> None:
        super().was_read(read, None if checksum is None else read.copy.checksum)


class PromotesPurged(TieredIndex):
    def purge(self, namespace: bytes) -> int:
        before = {ticket: group.is_void for ticket, group in self._groups.items()}
        result = super().purge(namespace)
        for ticket, group in self._groups.items():
            group.is_void = before[ticket]
        return result


class LeavesThemWaiting(TieredIndex):
    def answers(self, now_s: float) -> list[tuple[int, Hit]]:
        return super().answers(-1.0)


class KeepsTheLease(TieredIndex):
    def give_up(self, number: int) -> None:
        self._waiting.pop(number, None)


class RevivesPurged(DiskTier):
    def restore(self, segments: Sequence[Segment], purges: Iterable[Purge] = ()) -> None:
        super().restore(segments)


class CommitsPurged(DiskTier):
    def purge(self, namespace: bytes) -> int:
        writing = dict(self._writing_keys)
        result = super().purge(namespace)
        self._writing_keys = writing
        return result


class OverwritesLive(DiskTier):
    def _advance(self, num_bytes: int) -> bool:
        ring = self._ring
        if ring.offset + num_bytes > self.segment_bytes:
            ring.segment, ring.offset = (ring.segment + 1) % self.num_segments, PAGE
            ring.generation += 1
        return True


class SharesBetweenTenants(DiskTier):
    def find(self, key: bytes, namespace: bytes) -> DiskCopy | None:
        return self._disk_copies.get(key)


class IgnoresQuotas(DiskTier):
    def _make_room(self, namespace: bytes, num_bytes: int) -> bool:
        return True


class ForgetsBooks(DiskTier):
    def failed(self, number: int) -> None:
        self._writing_keys.pop(self._writing.pop(number).key, None)


class WritesBehindTheRing(DiskTier):
    """Goes on where the earlier life was thought to be, not where it was."""

    def restore(self, segments: Sequence[Segment], purges: Iterable[Purge] = ()) -> None:
        super().restore(segments, purges)
        self._ring.offset = PAGE


TIERS = [BelievesTheDisk, PromotesPurged, LeavesThemWaiting, KeepsTheLease]
DISKS = [
    RevivesPurged, CommitsPurged, OverwritesLive, SharesBetweenTenants, IgnoresQuotas, ForgetsBooks, WritesBehindTheRing
]  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("bug", [*TIERS, *DISKS], ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: type) -> None:
    kind = "tiers_type" if issubclass(bug, TieredIndex) else "tier_type"
    machine = type(f"{bug.__name__}Machine", (TiersMachine,), {kind: bug})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=HUNT)


# ---- single rules, readable --------------------------------------------------------------------------------------


def new_tier(num_segments: int = 4, blocks: int = 2, bytes_per_s: float = 1e12, **limits: int) -> DiskTier:
    return DiskTier(num_segments, PAGE + blocks * BLOCK, bytes_per_s=bytes_per_s, **limits)


def block(number: int, namespace: bytes = MINE) -> Record:
    return Record(State.COMMITTED, number.to_bytes(16, "big"), namespace, checksum=number, num_bytes=1)


def fill(tier: DiskTier, numbers: Iterable[int], namespace: bytes = MINE, now_s: float = 0.0) -> list[Write]:
    """In memory for a moment, and on disk."""
    done = []
    for number in numbers:
        tier.see([(0, block(number, namespace))])
        for write in tier.next_writes(now_s):
            tier.written(write.copy.number)
            done.append(write)
        tier.see([(0, Record())])
        tier.check()
    return done


def known(tier: DiskTier, numbers: Iterable[int], namespace: bytes = MINE) -> list[int]:
    return [number for number in numbers if tier.find(number.to_bytes(16, "big"), namespace)]


def test_the_oldest_segment_goes_as_a_whole() -> None:
    tier = new_tier(num_segments=3, blocks=2)
    fill(tier, range(6))
    assert known(tier, range(6)) == list(range(6))
    fill(tier, [6])
    assert known(tier, range(7)) == [2, 3, 4, 5, 6]
    assert tier.counters.forgotten == 2


def test_what_is_used_again_is_written_again_before_its_copy_goes() -> None:
    tier = new_tier(num_segments=4, blocks=1)
    fill(tier, range(4))
    (again,) = fill(tier, [0])  # came back to memory from the oldest segment
    assert again.copy.number > 4
    assert fill(tier, [3]) == [], "its copy is young"
    fill(tier, [7, 8])
    assert known(tier, [0, 1, 2, 3]) == [0, 3]


@pytest.mark.parametrize("num_segments", [2, 8])
def test_what_is_in_memory_when_its_segment_goes_is_written_again_unless_it_fills_the_disk(num_segments: int) -> None:
    tier = new_tier(num_segments, blocks=1)
    tier.see([(1, block(1)), (2, block(2))])
    for write in tier.next_writes(0.0):
        tier.written(write.copy.number)
    fill(tier, range(10, 10 + num_segments))
    num_written = tier.counters.written
    for _ in range(10):
        for write in tier.next_writes(0.0):
            tier.written(write.copy.number)
    assert tier.counters.written == num_written, "writes for ever"
    assert known(tier, [1, 2]) == ([1, 2] if num_segments == 8 else [])


def test_memory_may_forget_a_block_before_its_turn() -> None:
    tier = new_tier(bytes_per_s=1.0)
    tier.see([(0, block(0)), (1, block(1))])
    (write,) = tier.next_writes(0.0)  # now in debt
    tier.see([(0, Record()), (1, Record())])
    assert tier.num_pending == 0 and tier.counters.lost == 1
    tier.failed(write.copy.number)
    assert tier.counters.lost == 2, "its slot was reused before it was copied"
    tier.check()


@SUITE
@given(
    rate=st.floats(0.1, 50),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_no_more_is_written_than_was_allowed(rate: float, steps: list[tuple[float, int]]) -> None:
    """In every interval: its length times the rate, what was saved up, and the one block that may overdraw."""
    tier = new_tier(num_segments=8, blocks=16, bytes_per_s=rate * BLOCK)
    now_s, number, events = 0.0, 0, []
    for wait_s, count in steps:
        now_s += wait_s
        tier.see((slot, block(number + slot)) for slot in range(count))
        number += count
        writes = tier.next_writes(now_s)
        events.append((now_s, len(writes)))
        for write in writes:
            tier.written(write.copy.number)
        tier.check()
    for first in range(len(events)):
        total = 0
        for until_s, count in events[first:]:
            total += count
            assert total <= rate * (until_s - events[first][0]) + rate + 1 + 1e-6


def test_a_namespace_at_its_quota_forgets_its_own() -> None:
    tier = new_tier(num_segments=4, blocks=4, namespace_bytes=3 * BLOCK)
    fill(tier, range(3), THEIRS)
    fill(tier, range(10, 15), MINE)
    assert known(tier, range(10, 15)) == [12, 13, 14] and known(tier, range(3), THEIRS) == [0, 1, 2]
    tier.set_quotas({THEIRS: BLOCK, MINE: 0})
    assert known(tier, range(10, 15)) == [] and known(tier, range(3), THEIRS) == [2]
    assert fill(tier, [20], MINE) == []
    assert tier.held_bytes == {THEIRS: BLOCK}


def test_a_restart_knows_the_youngest_copy_and_goes_on_behind_it() -> None:
    tier = new_tier(num_segments=3, blocks=2)
    disk_copies = [write.copy for write in fill(tier, [0, 1, 2])]
    segments = [
        Segment(1, tuple(disk_copies[:2]), disk_copies[1].end),
        Segment(2, (disk_copies[2],), disk_copies[2].end),
        Segment(),
    ]
    later = new_tier(num_segments=3, blocks=2)
    later.restore(segments, [Purge(MINE, disk_copies[1].number)])
    assert known(later, [0, 1, 2]) == [1, 2], "the first was purged"
    (write,) = fill(later, [3])
    assert (write.copy.segment, write.copy.offset, write.copy.generation) == (1, disk_copies[2].end, 2)
    assert write.copy.number > disk_copies[2].number


def test_a_block_too_large_for_a_segment_is_not_wanted() -> None:
    tier = new_tier(blocks=2)
    tier.see([(0, Record(State.COMMITTED, b"k" * 16, MINE, num_bytes=3 * PAGE))])
    assert tier.num_pending == 1
    tier.see([(0, Record(State.COMMITTED, b"k" * 16, MINE, num_bytes=3 * PAGE + 1))])
    assert tier.num_pending == 0


# ---- both tiers --------------------------------------------------------------------------------------------------


def both(num_slots: int = 2) -> tuple[TieredIndex, DiskTier]:
    tiered_index = TieredIndex(PoolIndex(num_slots, lease_s=5.0, write_s=3.0), WorkerId("cache-0", 1))
    tier = new_tier(num_segments=4, blocks=8)
    tiered_index.add_tier(tier)
    return tiered_index, tier


def put(tiered_index: TieredIndex, tier: DiskTier, keys: Sequence[bytes]) -> None:
    grant = tiered_index.index.reserve(keys, WRITER, MINE, 0.0)
    tiered_index.index.commit(
        grant.ticket,
        WRITER,
        [Written(slot, keys[at][-1], 1) for slot, at in zip(grant.slots, grant.positions, strict=True)],
    )
    tiered_index.take_changes()
    for write in tier.next_writes(0.0):
        tier.written(write.copy.number)


def test_a_hit_in_memory_is_answered_at_once_and_one_on_disk_when_it_has_come() -> None:
    (tiered_index, tier), keys = both(), CHAINS[MINE]
    put(tiered_index, tier, keys[:1])
    put(tiered_index, tier, CHAINS[MINE][3:5])
    assert isinstance(tiered_index.lookup(keys[3:5], READER, MINE, 0.0, 1.0), Hit)
    tiered_index.index.expire(10.0)
    number = tiered_index.lookup(keys[:1], READER, MINE, 10.0, 1.0)
    assert not isinstance(number, Hit), "memory has forgotten it"
    assert tiered_index.lookup(keys[:1], READER, MINE, 10.0) == Hit(0, ()), "who does not wait gets nothing"
    assert tiered_index.answers(10.5) == [] and tiered_index.next_deadline_s == 11.0
    (read,) = tiered_index.take_reads(tier)
    tiered_index.was_read(read, read.copy.checksum)
    ((answered, hit),) = tiered_index.answers(10.5)
    assert answered == number and [each.checksum for each in hit.blocks] == [keys[0][-1]]
    tiered_index.check()


def test_who_waits_is_answered_in_time_with_what_is_there() -> None:
    (tiered_index, tier), keys = both(num_slots=3), CHAINS[MINE]
    put(tiered_index, tier, keys[:2])
    put(tiered_index, tier, CHAINS[MINE][3:5])  # the tail, keys[1], is forgotten
    assert tiered_index.lookup(keys[:2], READER, MINE, 0.0, 1.0) == 1
    ((_, hit),) = tiered_index.answers(1.0)
    assert len(hit.blocks) == 1, "the head was in memory, and was kept there"
    counters = tiered_index.index.counters
    assert (counters.hits, counters.misses) == (1, 1), "one look-up, not two"
    (read,) = tiered_index.take_reads(tier)
    tiered_index.was_read(read, read.copy.checksum)  # too late for this one
    again = tiered_index.lookup(keys[:2], READER, MINE, 1.0)
    assert isinstance(again, Hit) and len(again.blocks) == 2


def test_two_who_want_the_same_block_read_it_once() -> None:
    (tiered_index, tier), keys = both(), CHAINS[MINE]
    put(tiered_index, tier, keys[:1])
    put(tiered_index, tier, keys[3:5])
    assert [tiered_index.lookup(keys[:1], READER, MINE, 0.0, 1.0) for _ in range(2)] == [1, 2]
    (read,) = tiered_index.take_reads(tier)
    tiered_index.was_read(read, read.copy.checksum)
    assert [len(hit.blocks) for _, hit in tiered_index.answers(0.0)] == [1, 1]


class Shelf:
    """A third tier, by the protocol alone: it keeps every block that memory ever had."""

    capacity, next_deadline_s = 100, None

    def __init__(self) -> None:
        self.blocks: dict[bytes, StoredBlock] = {}
        self.quotas: dict[bytes, int] = {}

    def see(self, changes: Iterable[tuple[int, Record]]) -> None:
        for _, record in changes:
            if record.state is State.COMMITTED:
                kept = (record.key, record.namespace, record.position, record.checksum, record.num_bytes, record.form)
                self.blocks[record.key] = StoredBlock(*kept)

    def find(self, key: bytes, namespace: bytes) -> StoredBlock | None:
        found = self.blocks.get(key)
        return found if found is not None and found.namespace == namespace else None

    def was_read(self, block: StoredBlock, intact: bool) -> None:
        assert intact

    def purge(self, namespace: bytes) -> int:
        gone = [key for key, each in self.blocks.items() if each.namespace == namespace]
        for key in gone:
            del self.blocks[key]
        return len(gone)

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        self.quotas = dict(quotas)
        return 0

    def check(self) -> None:
        assert all(key == each.key for key, each in self.blocks.items())


def test_a_third_tier_is_searched_after_the_second_and_hears_of_purges_and_quotas() -> None:
    (tiered_index, disk), keys, shelf = both(), CHAINS[MINE], Shelf()
    tiered_index.add_tier(shelf)
    put(tiered_index, disk, keys[:1])
    put(tiered_index, disk, keys[3:5])
    tiered_index.remove_tier(disk)
    number = tiered_index.lookup(keys[:1], READER, MINE, 0.0, 1.0)
    (read,) = tiered_index.take_reads(shelf)
    tiered_index.was_read(read, read.copy.checksum)
    ((answered, hit),) = tiered_index.answers(0.5)
    assert answered == number and [each.checksum for each in hit.blocks] == [keys[0][-1]]
    tiered_index.set_quotas({MINE: 1})
    assert shelf.quotas == {MINE: 50}, "the same share as in memory"
    tiered_index.purge(MINE)
    assert tiered_index.lookup(keys[:1], READER, MINE, 1.0, 1.0) == Hit(0, ())
    tiered_index.check()
