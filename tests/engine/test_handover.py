"""Sequences that leave one scheduler for another: blocks have owners all the way, and nothing overtakes the old."""

from __future__ import annotations

import pytest

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.errors import InvalidRequest
from tripool.sequence import Sampled

SIZE = 4


def make(num_blocks: int = 16, **config: int) -> Scheduler:
    scheduling = SchedulerConfig(
        num_blocks=num_blocks, block_tokens=SIZE, **({"max_running": 4, "step_tokens": 32} | config)
    )
    return Scheduler(scheduling, model="m", context_tokens=1000)


def ask(name: str, num_prompt: int, first: int = 0, **params: int) -> Request:
    options = {"max_tokens": 8} | params
    return Request(
        id=name, prompt_ids=tuple(range(first, first + num_prompt)), params=SamplingParams(**options), seed=0
    )


def step(scheduler: Scheduler, token: int = 7) -> list[TokenEvent]:
    tasks = scheduler.schedule()
    events = scheduler.settle(tasks, [Sampled(token) if task.samples else None for task in tasks])
    scheduler.check()
    return events


def test_detached_holds_its_blocks_until_released() -> None:
    scheduler = make()
    scheduler.add(ask("a", 9))
    assert [event.token_id for event in step(scheduler)] == [7]
    seq = scheduler.detach("a", 0)
    scheduler.check()
    assert not scheduler.busy
    assert scheduler.pool.num_held == 3
    assert (seq.num_computed, seq.tokens[-1]) == (9, 7)
    scheduler.release(seq)
    scheduler.check()
    assert scheduler.pool.num_held == 0
    scheduler.add(ask("b", 9))
    assert step(scheduler)[0].num_cached_tokens == 8, "what left is still known here"


def test_followers_go_on_when_the_leader_has_left() -> None:
    scheduler = make()
    scheduler.add(ask("a", 9, n=3))
    step(scheduler)
    scheduler.release(scheduler.detach("a", 0))
    assert sorted(event.choice for event in step(scheduler)) == [1, 2]
    for choice in (1, 2):
        scheduler.release(scheduler.detach("a", choice))
    scheduler.check()
    assert scheduler.pool.num_held == 0
    scheduler.add(ask("a", 9))  # the name is free again


def test_adopted_runs_after_start() -> None:
    scheduler = make()
    seq = scheduler.attach(ask("a", 9), 2, [50], 9, num_cached=4)
    assert seq is not None
    scheduler.check()
    assert not scheduler.busy
    assert scheduler.pool.num_held == 3
    scheduler.start(seq)
    (event,) = step(scheduler)
    assert (event.choice, event.index, event.num_cached_tokens) == (2, 1, 4)
    while scheduler.busy:
        step(scheduler)
    assert scheduler.pool.num_held == 0


def test_shared_blocks_are_held_once() -> None:
    scheduler = make()
    first = scheduler.attach(ask("a#1", 9), 0, [50], 9)
    assert first is not None
    scheduler.start(first)
    second = scheduler.attach(ask("a#2", 9), 1, [51], 9, shared=first.table[:2])
    assert second is not None
    assert second.table[:2] == first.table[:2]
    scheduler.check()
    assert scheduler.pool.num_held == 4
    scheduler.cancel("a#1")
    scheduler.check()
    assert scheduler.pool.num_held == 3
    scheduler.start(second)
    step(scheduler)


def test_no_room_is_no_error_and_takes_nothing() -> None:
    scheduler = make(num_blocks=4)
    assert scheduler.attach(ask("a", 9), 0, [50], 9) is not None
    assert scheduler.attach(ask("b", 9), 0, [50], 9) is None
    scheduler.check()
    assert scheduler.pool.num_held == 3


def test_the_batch_is_bounded_with_those_that_arrive() -> None:
    scheduler = make(max_running=1)
    assert scheduler.attach(ask("a", 2), 0, [50], 2) is not None
    assert scheduler.attach(ask("b", 2), 0, [50], 2) is None
    scheduler.add(ask("c", 2))
    assert scheduler.schedule() == []


def test_whoever_was_preempted_goes_before_those_that_arrive() -> None:
    scheduler = make(num_blocks=6)
    for first, name in enumerate(("a", "b")):
        seq = scheduler.attach(ask(name, 7, first), 0, [50], 7)
        assert seq is not None
        scheduler.start(seq)
    while not scheduler.num_preemptions:
        step(scheduler)
    scheduler.cancel("a")
    assert scheduler.pool.can_allocate(2)
    assert scheduler.attach(ask("c", 2), 0, [50], 2) is None
    step(scheduler)
    assert scheduler.attach(ask("c", 2), 0, [50], 2) is not None


@pytest.mark.parametrize("where", ["arriving", "detached"])
def test_cancel_frees_what_is_on_its_way(where: str) -> None:
    scheduler = make()
    if where == "arriving":
        scheduler.attach(ask("a", 9), 0, [50], 9)
    else:
        scheduler.add(ask("a", 9))
        step(scheduler)
        scheduler.detach("a", 0)
    scheduler.cancel("a")
    scheduler.check()
    assert scheduler.pool.num_held == 0


def test_known_answers_are_computed_but_not_chosen_again() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5, n=3), answered={0: [60, 61], 2: []})
    forms = []
    events: list[TokenEvent] = []
    while len(events) < 2:
        tasks = scheduler.schedule()
        forms += [(task.seq.choice, task.work.decode, task.work.tokens) for task in tasks]
        events += scheduler.settle(tasks, [Sampled(9) if task.samples else None for task in tasks])
    assert (0, True, [60, 61]) in forms
    assert sorted((event.choice, event.index) for event in events[:2]) == [(0, 2), (2, 0)]


def test_an_answer_that_is_complete_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="8 of at most 8"):
        make().add(ask("a", 5), answered={0: [1] * 8})
