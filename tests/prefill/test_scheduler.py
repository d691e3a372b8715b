"""Prompts: admitted by age, within slots and budget, with the longest known prefix and never without work."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.cache import BlockPool, block_key, root_key
from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams
from tripool.prefill import PrefillScheduler
from tripool.prefill.scheduler import extend_keys
from tripool.sequence import Seq, Task

SIZE = 4


def make_seq(order: int, prompt: list[int], namespace: str = "", leader: Seq | None = None) -> Seq:
    request = Request(id=f"r{order}", prompt_ids=tuple(prompt), params=SamplingParams(), seed=0, namespace=namespace)
    return Seq(request, 0, order, max_new_tokens=8, tokens=list(prompt), leader=leader)


class Room:
    """A prefill scheduler with a pool, and the plainest `grow` there can be: take what is free."""

    def __init__(self, num_blocks: int = 100, *, prefix_reuse: bool = True) -> None:
        config = SchedulerConfig(num_blocks=num_blocks, block_tokens=SIZE, prefix_reuse=prefix_reuse)
        self.pool = BlockPool(num_blocks)
        self.scheduler = PrefillScheduler(config, self.pool, "m")

    def grow(self, seq: Seq, stop: int) -> int:
        need = min(-(-stop // SIZE) - len(seq.table), self.pool.num_free)
        seq.table.extend(self.pool.allocate(max(need, 0)))
        return min(stop, len(seq.table) * SIZE)

    def plan(self, budget: int = 1000, slots: int = 1000) -> list[Task]:
        return self.scheduler.plan(budget, slots, self.grow)

    def remember(self, tokens: list[int], namespace: str = "") -> list[int]:
        """Leave the full blocks of `tokens` behind, as a finished sequence does."""
        keys = extend_keys(make_seq(0, tokens, namespace), len(tokens), SIZE, "m")
        blocks = self.pool.allocate(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            self.pool.publish(block, key)
        self.pool.release(blocks)
        return blocks


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    arrival=st.randoms(use_true_random=False),
    budget=st.integers(1, 40),
    slots=st.integers(0, 8),
    num_blocks=st.integers(5, 30),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_admits_by_age_until_something_runs_out(
    lengths: list[int], arrival: Random, budget: int, slots: int, num_blocks: int
) -> None:
    room = Room(num_blocks, prefix_reuse=False)
    seqs = [make_seq(order, [order] * length) for order, length in enumerate(lengths)]
    for seq in arrival.sample(seqs, len(seqs)):
        room.scheduler.add(seq)
    tasks = room.plan(budget, slots)
    admitted = [task.seq for task in tasks]
    assert admitted == seqs[: len(admitted)], "somebody was overtaken"
    assert room.scheduler.waiting == seqs[len(admitted) :]
    rows = sum(len(task.work.tokens) for task in tasks)
    assert rows <= budget
    assert len(tasks) <= slots
    for task in tasks[:-1]:
        assert task.work.stop == task.seq.prompt_len, "a chunk was cut although budget was left for the next"
    if room.scheduler.waiting and rows < budget and len(tasks) < slots:
        assert not room.pool.can_allocate(room.scheduler.waiting[0].prompt_len // SIZE + 1)
    room.pool.check(seq.table for seq in seqs)


@given(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=60, max_size=60))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_chunks_follow_each_other_to_the_end(length: int, budgets: list[int]) -> None:
    room = Room()
    seq = make_seq(0, list(range(length)))
    room.scheduler.add(seq)
    rows: list[int] = []
    for budget in budgets:
        [task] = room.plan(budget)
        assert len(task.work.tokens) == min(budget, length - len(rows))
        rows += task.work.tokens
        seq.num_computed = task.work.stop
        if task.samples:
            break
    assert rows == seq.tokens
    assert len(seq.table) == -(-length // SIZE)


@given(known=st.integers(0, 20), length=st.integers(1, 20))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_takes_the_longest_known_prefix_but_computes_the_last_token(known: int, length: int) -> None:
    room = Room()
    blocks = room.remember(list(range(known)))
    seq = make_seq(1, list(range(length)))
    room.scheduler.add(seq)
    [task] = room.plan()
    num_found = min(known // SIZE, (length - 1) // SIZE)
    assert seq.table[:num_found] == blocks[:num_found]
    assert task.work.start == seq.num_cached == num_found * SIZE
    assert task.work.tokens == list(range(num_found * SIZE, length))


def test_namespaces_share_nothing() -> None:
    room = Room()
    room.remember(list(range(12)), namespace="a")
    for order, namespace in enumerate(["", "b", "a"]):
        room.scheduler.add(make_seq(order, list(range(12)), namespace))
    assert [task.work.start for task in room.plan()] == [0, 0, 8]


def test_reuse_can_be_switched_off() -> None:
    room = Room(prefix_reuse=False)
    room.remember(list(range(12)))
    room.scheduler.add(make_seq(1, list(range(12))))
    [task] = room.plan()
    assert (task.work.start, task.seq.num_cached) == (0, 0)


def test_remembered_blocks_are_no_extra_room() -> None:
    """Taking an idle block uses up a free one: 3 blocks cannot hold 12 known tokens and one more."""
    room = Room(num_blocks=3)
    room.remember(list(range(12)))
    room.scheduler.add(make_seq(1, list(range(12))))
    assert room.plan() == []
    assert room.pool.num_held == 0


def test_shared_blocks_need_no_room() -> None:
    room = Room(num_blocks=4)
    room.scheduler.add(make_seq(0, list(range(11))))
    [task] = room.plan()
    for block, key in zip(task.seq.table[:2], extend_keys(task.seq, 8, SIZE, "m"), strict=True):
        room.pool.publish(block, key)
    task.seq.num_computed = 11
    room.scheduler.remove(task.seq)  # on to decode, blocks and all
    room.scheduler.add(make_seq(1, list(range(11))))
    [second] = room.plan()
    assert second.seq.table[:2] == task.seq.table[:2]
    assert room.pool.num_free == 0


def test_the_first_count_of_cached_tokens_stands() -> None:
    room = Room()
    seq = make_seq(0, list(range(12)))
    room.scheduler.add(seq)
    room.plan()
    room.scheduler.remove(seq)
    room.pool.release(seq.table)
    seq.table, seq.num_computed = [], 0
    room.remember(list(range(12)))
    room.scheduler.add(seq)
    [task] = room.plan()
    assert task.work.start == 8
    assert seq.num_cached == 0


def test_choices_step_aside_for_others_until_their_leader_is_done() -> None:
    room = Room()
    leader = make_seq(0, list(range(8)))
    choice = make_seq(1, list(range(8)), leader=leader)
    other = make_seq(2, [9])
    for seq in (leader, choice, other):
        room.scheduler.add(seq)
    assert [task.seq for task in room.plan()] == [leader, other]
    leader.num_computed = 8
    room.scheduler.remove(leader)
    other.num_computed = 1
    room.scheduler.remove(other)
    assert [task.seq for task in room.plan()] == [choice]


def test_running_prompts_come_before_newcomers_whatever_their_age() -> None:
    room = Room()
    seq = make_seq(1, list(range(12)))
    room.scheduler.add(seq)
    [task] = room.plan(budget=4)
    seq.num_computed = task.work.stop
    room.scheduler.add(make_seq(0, [5]))
    assert [task.seq.order for task in room.plan(budget=9)] == [1, 0]


def test_a_prompt_short_of_blocks_computes_what_fits_and_lets_nobody_in() -> None:
    room = Room(num_blocks=4)
    seq = make_seq(0, list(range(12)))
    room.scheduler.add(seq)
    [task] = room.plan(budget=4)
    seq.num_computed = task.work.stop
    newcomer = make_seq(1, [5])
    room.scheduler.add(newcomer)
    taken = room.pool.allocate(2)
    [task] = room.plan()
    assert (task.seq, task.work.start, task.work.stop) == (seq, 4, 8)
    seq.num_computed = 8
    assert room.plan() == []
    assert len(seq.table) == 2
    room.pool.release(taken)
    assert [(task.seq, task.work.stop) for task in room.plan()] == [(seq, 12), (newcomer, 1)]


def test_a_sequence_comes_back_clean() -> None:
    seq = make_seq(0, [1])
    seq.num_computed = 1
    with pytest.raises(AssertionError):
        Room().scheduler.add(seq)


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 30), max_size=5), st.integers(1, 5))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_keys_grow_as_if_made_at_once(tokens: list[int], stops: list[int], size: int) -> None:
    seq = make_seq(0, tokens or [1], namespace="n")
    for stop in [*stops, len(seq.tokens)]:
        extend_keys(seq, min(stop, len(seq.tokens)), size, "m")
    expected = []
    key = root_key("m", "n")
    for end in range(size, len(seq.tokens) + 1, size):
        key = block_key(key, seq.tokens[end - size : end])
        expected.append(key)
    assert seq.keys == expected


def test_what_was_started_is_told_once() -> None:
    room = Room(num_blocks=3)
    first, second = make_seq(0, [1] * 5), make_seq(1, [2] * 5)
    room.scheduler.add(first)
    room.scheduler.add(second)
    room.plan()
    assert room.scheduler.started == [first]  # there are no blocks for the second
    room.plan()
    assert room.scheduler.started == []
    room.scheduler.remove(first)
    room.pool.release(first.table)
    room.plan()
    assert room.scheduler.started == [second]
    room.scheduler.remove(second)
    room.pool.release(second.table)
    second.table, second.num_computed = [], 0
    room.scheduler.add(second)  # preempted, and admitted again
    room.plan()
    assert room.scheduler.started == []
