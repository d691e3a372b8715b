"""Blocks read without asking: leases hold against eviction and purge and end with their readers; nothing is torn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.cache import namespace_tag
from tripool.cache.arena import NUM_READER_SLOTS, Arena
from tripool.cache.client import PoolClient, Prefix
from tripool.cache.index import PoolIndex
from tripool.cache.link import Acquired
from tripool.cache.records import State, Written
from tripool.cache.wire import Granted
from tripool.messages import SUPERVISOR, Reaped, Suspect, WorkerId

from .conftest import BLOCK_BYTES, WITHIN_S, Pool, buffers, chain, content, told, until
from .test_pool import fetched

KEYS, OTHERS = chain(1, 1), chain(2, 8)
READER, WRITER, SPACE = WorkerId("r", 1), WorkerId("w", 1), b"s" * 16


def filled(pool: Pool, keys: list[bytes], **config: float) -> PoolClient:
    """A pool that has shown these blocks to everybody."""
    pool.config |= config
    pool.start()
    client = pool.client()
    assert client.store(keys, [content(key) for key in keys], namespace="a") == len(keys)
    assert told(client).committed == len(keys)
    return client


def acquire(client: PoolClient, keys: list[bytes]) -> Prefix:
    """A look-up of which its member does not hear."""
    prefix = client.find(keys, namespace="a")
    assert prefix.num_blocks == len(keys) and all(isinstance(held.lease, Acquired) for held in prefix._held)
    return prefix


def stored(client: PoolClient, keys: list[bytes]) -> int:
    return client.store(keys, [content(key) for key in keys], namespace="a")


def test_a_known_prefix_is_read_without_its_member_and_counted_afterwards(pool: Pool) -> None:
    client = filled(pool, OTHERS[:4])
    before = told(client).hits
    pool.signal(signal.SIGSTOP)
    assert fetched(client, OTHERS[:4]) == 4 and fetched(client, OTHERS[:4], first=2) == 2
    assert client.fetch(OTHERS[:1], buffers(1), namespace="a") == 1
    pool.signal(signal.SIGCONT)
    assert told(client).hits == before + 7 and told(client).leases == 0


def test_uses_that_were_told_keep_a_block(pool: Pool) -> None:
    client = filled(pool, OTHERS[:2], num_slots=2)
    with acquire(client, OTHERS[:1]) as prefix:
        assert prefix.read(buffers(1)) == 1
    for turn in range(2, 6):  # the tail of a chain goes before its head, but not before a block used after it
        assert stored(client, chain(turn + 10, 1)) == 1
        assert fetched(client, OTHERS[:1]) == 1


def test_what_is_being_read_is_not_evicted(pool: Pool) -> None:
    client, more = filled(pool, KEYS, num_slots=2, lease_s=1000.0), chain(3, 4)
    reader = pool.client("d-0")
    with acquire(reader, KEYS) as prefix:
        assert stored(client, OTHERS[:2]) == 1, "the other slot"
        assert stored(client, more[:2]) == 1, "and again that one"
        assert prefix.read(buffers(1)) == 1
    until(lambda: told(client).leases == 0)
    assert stored(client, chain(4, 2)) == 2 and fetched(reader, KEYS) == 0


def test_a_purged_block_is_found_by_nobody_and_its_slot_waits_for_its_reader(pool: Pool) -> None:
    client = filled(pool, KEYS, num_slots=1, lease_s=1000.0)
    reader = pool.client("d-0")
    with acquire(reader, KEYS) as prefix:
        assert client.purge([namespace_tag("a")]) == 1
        assert fetched(client, KEYS) == 0 and fetched(reader, KEYS) == 0
        assert stored(client, OTHERS[:1]) == 0, "someone may be copying it"
        assert prefix.read(buffers(1)) == 0, "it is purged"
    until(lambda: stored(client, OTHERS[:1]) == 1)
    assert fetched(reader, OTHERS[:1]) == 1


def test_a_stopped_reader_is_turned_out_when_its_time_is_over(pool: Pool) -> None:
    client = filled(pool, KEYS, num_slots=1, lease_s=0.05)
    reader = pool.client("d-0")
    prefix = acquire(reader, KEYS)
    assert stored(client, OTHERS[:1]) == 0
    until(lambda: stored(client, OTHERS[:1]) == 1)
    assert prefix.read(buffers(1)) == 0, "another block's bytes"
    prefix.release()
    assert told(reader).bad == 0 and fetched(reader, OTHERS[:1]) == 1


def test_a_suspect_reads_under_no_lease(pool: Pool) -> None:
    client = filled(pool, KEYS, num_slots=1, lease_s=1000.0)
    reader = pool.client("d-0")
    prefix = acquire(reader, KEYS)
    supervisor = pool.client(SUPERVISOR)
    assert supervisor.report(Suspect(WorkerId("d-0", 1))) == []
    assert told(supervisor).strange_messages == 0  # it has heard it, and minds it
    assert stored(client, OTHERS[:1]) == 1
    assert prefix.read(buffers(1)) == 0
    assert supervisor.report(Reaped(WorkerId("d-0", 1))) == []


READS = """
import sys
from tests.cache.conftest import LocalHost, Path, PoolClient, WorkerId, WITHIN_S
client = PoolClient(LocalHost(Path(sys.argv[1])), ["cache-0"], WorkerId("d-0", 1), wait_s=WITHIN_S)
assert client.wait(WITHIN_S) == []
prefix = client.find([bytes.fromhex(sys.argv[2])], namespace="a")
print(prefix.num_blocks, type(prefix._held[0].lease).__name__, flush=True)
sys.stdin.read()
"""


def test_a_killed_readers_slots_are_free_at_once(pool: Pool) -> None:
    client = filled(pool, KEYS, num_slots=1, lease_s=1000.0)
    reader = pool.run(READS, KEYS[0].hex())
    assert reader.stdout is not None and reader.stdout.readline() == "1 Acquired\n"
    assert stored(client, OTHERS[:1]) == 0, "it is being read"
    os.kill(reader.pid, signal.SIGKILL)
    reader.wait(WITHIN_S)
    until(lambda: stored(client, OTHERS[:1]) == 1)
    assert told(client).leases == 0 and fetched(client, OTHERS[:1]) == 1


def test_a_member_that_starts_again_knows_no_seats_and_its_readers_notice(pool: Pool) -> None:
    client = filled(pool, KEYS, num_slots=1, lease_s=1000.0)
    reader = pool.client("d-0")
    prefix = acquire(reader, KEYS)
    pool.kill()
    pool.start()
    assert client.wait(WITHIN_S) == []
    assert stored(client, OTHERS[:1]) == 1
    assert prefix.read(buffers(1)) == 0
    assert reader.wait(WITHIN_S) == []
    prefix.release()
    assert told(client).committed == 1
    with acquire(reader, OTHERS[:1]) as other:
        assert stored(client, KEYS) == 0, "rising from a seat of a closed line is nobody else's rising"
        assert other.read(buffers(1)) == 1


def test_a_damaged_block_is_forgotten_though_nobody_asked(pool: Pool) -> None:
    client = filled(pool, OTHERS[:3])
    with acquire(client, OTHERS[:3]) as prefix:
        slot = prefix.blocks[1].slot
    Arena.attach(pool.folder / "cache-0.arena").write(slot, content(KEYS[0]))
    assert fetched(client, OTHERS[:3]) == 1
    assert told(client).bad == 1 and told(client).committed == 2


def test_who_gets_no_seat_asks(pool: Pool) -> None:
    client = filled(pool, KEYS)
    crowd = [pool.client(f"w-{number}") for number in range(NUM_READER_SLOTS - 1)]
    late = pool.client("late")
    with late.find(KEYS, namespace="a") as prefix:
        assert [type(held.lease) for held in prefix._held] == [int] and prefix.read(buffers(1)) == 1
    crowd[0].close()

    def sits() -> bool:
        late.close()
        return late.wait(WITHIN_S) == [] and late._links["cache-0"]._reader_slot >= 0

    until(sits)
    assert fetched(late, KEYS) == 1 and told(client).committed == 1


@pytest.mark.parametrize("place", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_slot_that_changes_while_it_is_copied_is_a_miss(pool: Pool, place: int) -> None:
    """The lease is taken away between look-up and copy, and a writer is in the middle of the slot."""
    client = filled(pool, KEYS, num_slots=1)
    reader = pool.client("d-0")
    with acquire(reader, KEYS) as prefix:
        arena, slot = prefix._held[0].found.arena, prefix.blocks[0].slot
        arena.evict_readers(slot)
        link = client._links["cache-0"]
        assert link.answer(link.reserve(namespace_tag("a"), (OTHERS[0],)), Granted)
        arena.view(slot, BLOCK_BYTES)[place] ^= 0xFF
        assert prefix.read(buffers(1)) == 0
    assert told(client).bad == 0 and told(client).reserved == 1


# ---- the index -----------------------------------------------------------------------------------------------------


class Room:
    """Seats as an index sees them."""

    def __init__(self) -> None:
        self.sitting: set[int] = set()
        self.closed: set[int] = set()

    def close_if_unread(self, slot: int) -> bool:
        if slot in self.sitting:
            return False
        self.closed.add(slot)
        return True

    def is_read(self, slot: int) -> bool:
        return slot in self.sitting

    def evict_readers(self, slot: int) -> None:
        self.sitting.discard(slot)


def committed(index: PoolIndex) -> set[int]:
    return {slot for slot, record in enumerate(index.records) if record.state is State.COMMITTED}


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "sit", "rise", "purge", "look", "use", "wait"]), st.integers(0, 9))
)


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_a_slot_is_never_given_out_under_a_reader_who_was_there_first(steps: Iterable[Step]) -> None:
    room, now_s = Room(), 0.0
    index = PoolIndex(3, lease_s=5.0, write_s=3.0, shared_readers=room)
    for do, number in steps:
        key, watched, before = bytes([number]) * 16, frozenset(room.sitting), list(index.records)
        now_s += 0.5
        match do:
            case "store":
                grant = index.reserve([key], WRITER, SPACE, now_s)
                assert not watched & set(grant.slots), "given out under its reader"
                index.commit(grant.ticket, WRITER, [Written(slot, number, 1) for slot in grant.slots])
            case "sit":
                room.sitting |= {slot for slot in committed(index) if slot == number % 3}
            case "rise":
                room.sitting.discard(number % 3)
            case "purge":
                index.purge(SPACE)
            case "look":
                index.release(index.lookup([key], READER, SPACE, now_s).lease, READER)
            case "use":
                index.used([(number % 3, before[number % 3].ticket), (99, 1)], READER)
            case "wait":
                now_s += number
                index.expire(now_s)
        index.check()
        for slot in watched & room.sitting:
            assert index.records[slot].state in (State.COMMITTED, State.DOOMED)
            assert index.records[slot].ticket == before[slot].ticket, "another block under the same reader"
        assert all(index.records[slot] is not before[slot] for slot in room.closed), "closed, and kept"
        room.closed.clear()
    room.sitting.clear()
    index.expire(now_s + 100)
    index.check()
    assert index.num_leases == 0 and index.num_free + index.num_committed == 3


def test_who_stays_too_long_is_turned_out() -> None:
    room = Room()
    index = PoolIndex(1, lease_s=5.0, write_s=3.0, shared_readers=room)
    grant = index.reserve([b"k" * 16], WRITER, SPACE, 0.0)
    index.commit(grant.ticket, WRITER, [Written(0, 1, 1)])
    room.sitting = {0}
    assert not index.reserve([b"l" * 16], WRITER, SPACE, 1.0).ticket and index.num_leases == 1
    index.expire(5.9)
    assert index.num_leases == 1 and room.sitting
    index.expire(6.0)
    assert index.num_leases == 0 and not room.sitting and index.counters.expired_leases == 1
    assert index.reserve([b"l" * 16], WRITER, SPACE, 6.0).slots == (0,)


def test_what_was_used_counts_if_it_is_still_the_same_block() -> None:
    index = PoolIndex(2, lease_s=5.0, write_s=3.0)
    keys = [b"a" * 16, b"b" * 16]
    grant = index.reserve(keys, WRITER, SPACE, 0.0)
    index.commit(grant.ticket, WRITER, [Written(slot, 1, 1) for slot in grant.slots])
    index.used([(grant.slots[0], grant.ticket), (grant.slots[1], grant.ticket + 1)], READER)
    assert index.counters.hits == 1
    index.used([(slot, grant.ticket) for slot in grant.slots], READER, bad=[grant.slots[1]])
    assert (index.counters.hits, index.counters.bad, index.num_committed) == (2, 1, 1)
    index.reaped(READER)
    index.used([(grant.slots[0], grant.ticket)], READER)
    assert index.counters.hits == 2
    index.check()
