"""Seq cuts its work into pieces of one form that follow each other without gap or overlap."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import Request, SamplingParams
from tripool.sequence import Seq, Task


def make_seq(prompt_len: int, num_generated: int = 0, leader: Seq | None = None) -> Seq:
    prompt = tuple(range(100, 100 + prompt_len))
    request = Request(id="r", prompt_ids=prompt, params=SamplingParams(), seed=0)
    answer = range(200, 200 + num_generated)
    return Seq(request, 0, 0, max_new_tokens=64, tokens=[*prompt, *answer], leader=leader)


@given(
    prompt_len=st.integers(1, 40),
    num_generated=st.integers(0, 40),
    num_cached=st.integers(0, 79),
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_work_covers_every_token_once_in_one_form_each(
    prompt_len: int, num_generated: int, num_cached: int, counts: list[int]
) -> None:
    seq = make_seq(prompt_len, num_generated)
    seq.num_computed = num_cached % len(seq.tokens)
    done = seq.tokens[: seq.num_computed]
    for count in chain(counts, repeat(1)):
        work = seq.work(count)
        assert work.start == len(done)
        assert 1 <= len(work.tokens) <= count
        assert work.stop == work.start + len(work.tokens)
        assert work.decode == (work.start >= prompt_len)
        assert work.decode or work.stop <= prompt_len, "prompt and answer in one piece"
        assert len(work.tokens) == count or work.stop in (prompt_len, len(seq.tokens)), "shorter than it may be"
        assert Task(seq, work).samples == (work.stop == len(seq.tokens))
        done += work.tokens
        seq.num_computed = work.stop
        if work.stop == len(seq.tokens):
            break
    assert done == seq.tokens


def test_no_work_when_nothing_is_left() -> None:
    seq = make_seq(3)
    seq.num_computed = 3
    with pytest.raises(AssertionError, match="nothing left"):
        seq.work(1)


def test_a_task_sees_blocks_added_later_and_survives_losing_them() -> None:
    """`grow` extends the table after the work was cut; a cancel replaces it while the step still runs."""
    seq = make_seq(3)
    work = seq.work(3)
    seq.table.append(7)
    assert work.table == [7]
    seq.table = []
    assert work.table == [7]


def test_a_choice_waits_until_its_leader_has_computed_the_prompt() -> None:
    leader = make_seq(3)
    choice = make_seq(3, leader=leader)
    assert not leader.waits
    assert choice.waits
    leader.num_computed = 2
    assert choice.waits
    leader.num_computed = 3
    assert not choice.waits
    leader.num_computed = 0  # preempted
    assert choice.waits
    leader.finish = "abort"
    assert not choice.waits
