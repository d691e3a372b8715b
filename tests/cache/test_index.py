"""PoolIndex against the model of its rules, and bugs that must not survive the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tripool.cache.index import PoolIndex
from tripool.cache.records import Written
from tripool.messages import WorkerId

from .index_model import CHAINS, LEASE_S, LIVES, SPACES, WRITE_S, IndexMachine

READER, WRITER = LIVES[0], LIVES[2]
MINE, THEIRS = SPACES
KEYS = CHAINS[MINE]

SUITE = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None)
HUNT = settings(
    SUITE,
    max_examples=10_000,  # which examples are drawn depends on hypothesis' version: of 2,000 one found too few
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


class CostMachine(IndexMachine):
    by_cost = True


@pytest.mark.parametrize("machine", [IndexMachine, CostMachine])
def test_any_order_of_events_keeps_the_rules(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=SUITE)


@pytest.mark.prove
@pytest.mark.parametrize("machine", [IndexMachine, CostMachine])
def test_any_order_of_many_more_events_keeps_the_rules(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(SUITE, max_examples=3000, stateful_step_count=100))


# ---- planted bugs ------------------------------------------------------------------------------------------------


class EvictsLeased(PoolIndex):
    def _make_room(self, namespace: bytes, spared: set[int]) -> bool:
        if not super()._make_room(namespace, spared) and self._leases.readers and self._slots.num_free == 0:
            slot = next(iter(self._leases.readers))
            if slot in self._slot_of.values():
                del self._slot_of[self._slots.records[slot].key]
                self._slots.drop(slot)
                return True
        return bool(self._slots.num_free)


class ReusesBeforeReaping(PoolIndex):
    def _fence(self, ticket: int) -> None:
        for slot in self._reservations.pop(ticket).slots:
            self._settle(slot, None)


class KeepsLease(PoolIndex):
    def release(self, lease: int, reader: WorkerId, bad: Iterable[int] = ()) -> None:
        if list(bad):
            super().release(lease, reader, bad)


class ServesTorn(PoolIndex):
    """Believes that a writer who gave up had written everything."""

    def commit(self, ticket: int, writer: WorkerId, written: Sequence[Written]) -> int:
        held = self._reservations.get(ticket)
        return super().commit(ticket, writer, written or [Written(slot, 0, 1) for slot in (held.slots if held else ())])


class HearsStrangers(PoolIndex):
    def release(self, lease: int, reader: WorkerId, bad: Iterable[int] = ()) -> None:
        known = self._leases.get(lease)
        super().release(lease, known.reader if known else reader, bad)


class ForgetsDeath(PoolIndex):
    def reaped(self, worker_id: WorkerId) -> None:
        super().reaped(worker_id)
        self._dead.clear()


class SharesBetweenTenants(PoolIndex):
    def lookup(self, keys, reader, namespace, now_s):  # type: ignore[no-untyped-def]  # as short as the bug
        found = self._slot_of.get(keys[0])
        return super().lookup(
            keys, reader, self._slots.records[found].namespace if found is not None else namespace, now_s
        )


class RevivesPurged(PoolIndex):
    def purge(self, namespace: bytes) -> int:
        headers = self.take_changes()
        num_gone = super().purge(namespace)
        self.take_changes()
        self._slots._changed = {slot: None for slot, _ in headers}
        return num_gone


class EvictsYoungest(PoolIndex):
    def _make_room(self, namespace: bytes, spared: set[int]) -> bool:
        for slot in [slot for slot in range(self.num_slots) if slot in self._slots.idle][:-1]:
            self._slots.idle.leave(slot)
            self._slots.enter_idle([slot])
        return super()._make_room(namespace, spared)


class EvictsHeads(PoolIndex):
    def commit(self, ticket: int, writer: WorkerId, written: Sequence[Written]) -> int:
        num_committed = super().commit(ticket, writer, written)
        slots = [each.slot for each in written if each.slot in self._slots.idle]
        for slot in slots:
            self._slots.idle.leave(slot)
        self._slots.enter_idle(slots)
        return num_committed


PLANTED = [
    EvictsLeased, ReusesBeforeReaping, KeepsLease, ForgetsDeath, SharesBetweenTenants, RevivesPurged, EvictsYoungest,
    EvictsHeads, *(pytest.param(bug, marks=pytest.mark.prove) for bug in (ServesTorn, HearsStrangers)),
]  # fmt: skip
"""The last two need a thousand histories and more."""


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: type[PoolIndex]) -> None:
    machine = type(f"{bug.__name__}Machine", (IndexMachine,), {"index_type": bug})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=HUNT)


# ---- single rules, readable --------------------------------------------------------------------------------------


def new_index(num_slots: int = 3) -> PoolIndex:
    return PoolIndex(num_slots, lease_s=LEASE_S, write_s=WRITE_S)


def put(index: PoolIndex, keys: Sequence[bytes], now_s: float = 0.0) -> tuple[int, ...]:
    grant = index.reserve(keys, WRITER, MINE, now_s)
    index.commit(grant.ticket, WRITER, [Written(slot, checksum, 10) for checksum, slot in enumerate(grant.slots)])
    return grant.slots


def test_a_reserved_block_is_not_found_and_not_given_twice() -> None:
    index = new_index()
    index.reserve(KEYS[:2], WRITER, MINE, 0.0)
    assert not index.lookup(KEYS, READER, MINE, 0.0).blocks
    assert index.reserve(KEYS[:3], READER, MINE, 0.0).positions == (2,)


def test_a_late_writers_slot_waits_for_its_death_and_its_key_does_not() -> None:
    index = new_index(2)
    late = index.reserve(KEYS[:1], WRITER, MINE, 0.0)
    index.expire(WRITE_S)
    again = index.reserve(KEYS[:2], READER, MINE, WRITE_S)
    assert again.positions == (0,) and again.slots != late.slots  # the other slot is nobody's yet
    index.reaped(WRITER)
    assert index.reserve(KEYS[1:2], READER, MINE, WRITE_S).slots == late.slots
    assert not index.reserve(KEYS[2:3], WRITER, MINE, WRITE_S).slots, "the dead reserve nothing"
    index.check()


def test_a_late_commit_is_taken_unless_someone_was_faster() -> None:
    index = new_index()
    late = index.reserve(KEYS[:2], WRITER, MINE, 0.0)
    index.expire(WRITE_S)
    faster = index.reserve(KEYS[:1], READER, MINE, WRITE_S)
    index.commit(faster.ticket, READER, [Written(faster.slots[0], 77, 10)])
    assert index.commit(late.ticket, WRITER, [Written(slot, 55, 10) for slot in late.slots]) == 1
    assert [block.checksum for block in index.lookup(KEYS, READER, MINE, WRITE_S).blocks] == [77, 55]
    assert index.num_reserved == 0
    index.check()


def test_what_is_read_is_never_evicted_and_a_full_pool_refuses() -> None:
    index = new_index(2)
    put(index, KEYS[:2])
    hit = index.lookup(KEYS[:1], READER, MINE, 0.0)
    assert len(put(index, KEYS[2:5])) == 1
    assert index.reserve(CHAINS[THEIRS][:1], WRITER, THEIRS, 0.0).slots  # evicts the one just put
    assert not index.reserve(CHAINS[THEIRS][1:], WRITER, THEIRS, 0.0).slots
    index.release(hit.lease, READER)
    assert index.reserve(CHAINS[THEIRS][1:], WRITER, THEIRS, 0.0).slots
    index.check()


def test_a_damaged_block_goes_when_its_other_readers_are_done() -> None:
    index = new_index(1)
    (slot,) = put(index, KEYS[:1])
    first, second = index.lookup(KEYS[:1], READER, MINE, 0.0), index.lookup(KEYS[:1], WRITER, MINE, 0.0)
    index.release(first.lease, READER, [slot])
    assert index.counters.bad == 1
    assert not index.lookup(KEYS[:1], READER, MINE, 0.0).blocks
    assert not index.reserve(KEYS[:1], WRITER, MINE, 0.0).slots
    index.release(second.lease, WRITER)
    assert index.reserve(KEYS[:1], WRITER, MINE, 0.0).slots == (slot,)
    index.check()


def test_the_tail_of_a_chain_goes_first() -> None:
    index = new_index(3)
    put(index, KEYS[:3])
    index.reserve(CHAINS[THEIRS][:1], WRITER, THEIRS, 0.0)
    assert len(index.lookup(KEYS, READER, MINE, 0.0).blocks) == 2


def test_numbers_of_an_earlier_life_mean_nothing() -> None:
    index = new_index(1)
    put(index, KEYS[:1])
    headers = [record for _, record in sorted(index.take_changes())]
    hit = index.lookup(KEYS[:1], READER, MINE, 0.0)
    later = PoolIndex(1, lease_s=LEASE_S, write_s=WRITE_S, first_number=1000)
    later.restore(headers)
    assert later.lookup(KEYS[:1], READER, MINE, 0.0).blocks == hit.blocks
    later.release(hit.lease, READER, [hit.blocks[0].slot])
    assert later.num_leases == 1 and later.counters.bad == 0
    with pytest.raises(AssertionError, match="above all earlier"):
        new_index(1).restore(headers)
