"""Drafts under the colocated scheduler, step by step: what a right one gives, and that a wrong one leaves no trace."""

from __future__ import annotations

import pytest

from tripool.core import TokenEvent
from tripool.engine.scheduler import Scheduler

from .test_scheduler import make_request, make_scheduler, rows, settle


def draft_step(scheduler: Scheduler, tokens: list[int], guesses: dict[str, int]) -> tuple[list[int], list[TokenEvent]]:
    """One step in which every answer goes on with `tokens`: the first, and the second where a draft says the first.

    Returns the number of rows of each task; afterwards the named requests have a draft.
    """
    tasks = scheduler.schedule()
    num_rows = [task.num_rows for task in tasks]
    events = settle(scheduler, tasks, tokens[0])
    followers = [follower for task in tasks if (follower := scheduler.verify(task))]
    events += settle(scheduler, followers, tokens[-1])
    for task in tasks:
        if task.seq.request.id in guesses and task.seq.wants_draft:
            scheduler.propose(task.seq, guesses[task.seq.request.id])
    scheduler.check()
    return num_rows, events


def test_a_right_draft_gives_two_tokens_and_a_wrong_one_costs_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=9))
    rows, events = draft_step(scheduler, [7], {"a": 8})
    assert (rows, [e.token_id for e in events]) == ([3], [7])
    [task] = scheduler.schedule()
    assert (task.work.tokens, task.draft, task.rows.tokens, task.rows.start) == ([7], 8, [7, 8], 3)
    events = settle(scheduler, [task], 8)
    follower = scheduler.verify(task)
    assert follower is not None
    assert (follower.work.tokens, follower.work.start, follower.work.decode) == ([8], 4, True)
    events += settle(scheduler, [follower], 9)
    assert [(e.index, e.token_id) for e in events] == [(1, 8), (2, 9)]
    scheduler.propose(task.seq, 5)
    rows, events = draft_step(scheduler, [6], {})
    assert (rows, [(e.index, e.token_id) for e in events]) == ([2], [(3, 6)])
    rows, events = draft_step(scheduler, [6], {})
    assert rows == [1], "a draft is for one step"
    assert (events[-1].num_draft_tokens, events[-1].num_accepted_draft_tokens) == (2, 1)
    assert (scheduler.num_drafted, scheduler.num_accepted) == (2, 1)


def test_a_wrong_draft_is_in_no_block_that_others_find() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=9))
    draft_step(scheduler, [3], {"a": 9})
    draft_step(scheduler, [4], {})  # the draft stood in the block's last slot, and was wrong
    scheduler.add(make_request("b", [1, 2, 3, 9, 5], max_tokens=1))
    scheduler.add(make_request("c", [1, 2, 3, 4, 5], max_tokens=1))
    assert rows(scheduler.schedule())[-2:] == [("b", 0, 0, 5), ("c", 0, 0, 5)], "the block is not full yet"
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=9))
    draft_step(scheduler, [3], {"a": 9})
    draft_step(scheduler, [4], {})
    draft_step(scheduler, [5], {})  # the true token's row has taken the slot
    scheduler.add(make_request("b", [1, 2, 3, 9, 5], max_tokens=1))
    scheduler.add(make_request("c", [1, 2, 3, 4, 5], max_tokens=1))
    assert rows(scheduler.schedule())[-2:] == [("b", 0, 0, 5), ("c", 0, 4, 5)]


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"max_tokens": 2}, [7, 7]),
        ({"max_tokens": 3}, [7, 7, 7]),
        ({"stop_token_ids": [7]}, [7]),
        ({"stop_token_ids": [8]}, [7, 7, 8]),
    ],
)
def test_an_answer_ends_between_two_tokens_of_a_step(params: dict[str, object], tokens: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], **params))
    seen: list[int] = []
    while scheduler.busy:
        last = 8 if "stop_token_ids" in params else 7
        seen += [e.token_id for e in draft_step(scheduler, [7, last], {"a": 7})[1]]
    assert seen == tokens
    assert scheduler.pool.num_held == 0


def test_nobody_is_preempted_and_no_prompt_stopped_for_a_draft() -> None:
    scheduler = make_scheduler(num_blocks=3, context_tokens=12, max_running=2, step_tokens=4)
    scheduler.add(make_request("old", [1, 2, 3], max_tokens=8))
    scheduler.add(make_request("young", [5], max_tokens=8))
    draft_step(scheduler, [7], {"old": 7, "young": 7})  # both hold a block, one is free
    tasks = scheduler.schedule()
    # Four rows in a step: both tokens, one draft, and one is kept for prompts. The draft takes the last block.
    assert [(t.seq.request.id, t.draft) for t in tasks] == [("old", 7), ("young", None)]
    settle(scheduler, tasks)
    assert scheduler.num_preemptions == 0
    assert scheduler.pool.num_free == 0


def test_a_draft_goes_without_when_the_last_block_is_taken() -> None:
    scheduler = make_scheduler(num_blocks=2, context_tokens=8)
    scheduler.add(make_request("old", [1, 2, 3], max_tokens=5))
    scheduler.add(make_request("young", [5], max_tokens=6))
    draft_step(scheduler, [7], {"old": 7})
    num_rows, _ = draft_step(scheduler, [7], {"old": 7})
    assert num_rows == [1, 1], "the draft would have needed the younger one's block"
    assert scheduler.num_preemptions == 0
    num_rows, _ = draft_step(scheduler, [7], {})
    assert num_rows == [2], "the certain token takes it, and then there is room for a draft"
    assert scheduler.num_preemptions == 1
