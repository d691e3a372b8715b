"""The running batch: one row per sequence, oldest first, whatever happens to the younger ones meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import Request, SamplingParams
from tripool.decode import DecodeScheduler
from tripool.sequence import Seq


def make_seq(order: int, num_generated: int = 1) -> Seq:
    request = Request(id=f"r{order}", prompt_ids=(1, 2), params=SamplingParams(), seed=0)
    tokens = [1, 2, *range(10, 10 + num_generated)]
    return Seq(request, 0, order, max_new_tokens=8, tokens=tokens, num_computed=len(tokens) - 1)


@given(st.lists(st.integers(0, 50), unique=True, max_size=10))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_everyone_takes_the_newest_token_oldest_first(orders: list[int]) -> None:
    scheduler = DecodeScheduler()
    for order in orders:
        scheduler.admit(make_seq(order, num_generated=1 + order % 3))
    asked: list[tuple[int, int]] = []

    def grow(seq: Seq, stop: int) -> int:
        asked.append((seq.order, stop))
        return stop

    tasks = scheduler.plan(grow)
    assert [task.seq.order for task in tasks] == sorted(orders)
    assert asked == [(task.seq.order, len(task.seq.tokens)) for task in tasks]
    for task in tasks:
        assert task.work.tokens == task.seq.tokens[-1:]
        assert task.work.decode
        assert task.samples


@given(st.integers(1, 8), st.data())
@settings(max_examples=100, derandomize=True, deadline=None)
def test_victims_and_refused_ones_get_no_task(count: int, data: st.DataObject) -> None:
    """`grow` may take younger sequences out of the batch while it is being planned, or say no."""
    scheduler = DecodeScheduler()
    for order in range(count):
        scheduler.admit(make_seq(order))
    refused: set[int] = set()

    def grow(seq: Seq, stop: int) -> int:
        assert seq in scheduler.running, "asked for a sequence that was already taken out"
        while scheduler.running[-1] is not seq and data.draw(st.booleans()):
            scheduler.remove(scheduler.running[-1])
        if data.draw(st.booleans()):
            refused.add(seq.order)
            return seq.num_computed
        return stop

    tasks = scheduler.plan(grow)
    assert {task.seq.order for task in tasks} == {seq.order for seq in scheduler.running} - refused


@pytest.mark.parametrize("num_computed", [0, 1, 3])
def test_only_a_sequence_with_one_token_to_go_is_handed_over(num_computed: int) -> None:
    seq = make_seq(0)
    seq.num_computed = num_computed
    with pytest.raises(AssertionError):
        DecodeScheduler().admit(seq)


def test_the_block_table_moves_with_the_sequence() -> None:
    scheduler, seq = DecodeScheduler(), make_seq(0)
    seq.table = [4, 2]
    scheduler.admit(seq)
    [task] = scheduler.plan(lambda seq, stop: stop)
    assert task.work.table is seq.table
    scheduler.remove(seq)
    assert scheduler.plan(lambda seq, stop: stop) == []
