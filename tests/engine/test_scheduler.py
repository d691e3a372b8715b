"""The colocated scheduler, step by step: small cases whose every step a reader can follow."""

from __future__ import annotations

import pytest

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.sequence import Sampled, Task

SIZE = 4


def make_scheduler(num_blocks: int = 16, context_tokens: int = 64, **bounds: int) -> Scheduler:
    limits = {"max_running": 4, "step_tokens": 16, **bounds}
    config = SchedulerConfig(num_blocks=num_blocks, block_tokens=SIZE, **limits)
    return Scheduler(config, model="m", context_tokens=context_tokens)


def make_request(name: str, prompt: list[int], namespace: str = "", **params: object) -> Request:
    return Request(
        id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams.from_options(params),
        seed=0,
        end_ids=frozenset({0}),
        namespace=namespace,
    )


def rows(tasks: list[Task]) -> list[tuple[str, int, int, int]]:
    return [(t.seq.request.id, t.seq.choice, t.work.start, t.work.stop) for t in tasks]


def settle(scheduler: Scheduler, tasks: list[Task], token: int = 7) -> list[TokenEvent]:
    events = scheduler.settle(tasks, [Sampled(token) if task.samples else None for task in tasks])
    scheduler.check()
    return events


def step(scheduler: Scheduler, token: int = 7) -> list[TokenEvent]:
    return settle(scheduler, scheduler.schedule(), token)


def run(scheduler: Scheduler, token: int = 7) -> list[TokenEvent]:
    events = []
    while scheduler.busy:
        events += step(scheduler, token)
    assert scheduler.pool.num_held == 0
    return events


def test_chunks_then_one_token_per_step_to_the_limit() -> None:
    scheduler = make_scheduler(step_tokens=5)
    scheduler.add(make_request("a", list(range(1, 13)), max_tokens=3))
    seen = []
    events = []
    while scheduler.busy:
        tasks = scheduler.schedule()
        seen += [(start, stop) for _, _, start, stop in rows(tasks)]
        events += settle(scheduler, tasks)
    assert seen == [(0, 5), (5, 10), (10, 12), (12, 13), (13, 14)]
    assert [(e.index, e.token_id, e.finish_reason) for e in events] == [(0, 7, None), (1, 7, None), (2, 7, "length")]


def test_decoding_goes_first_and_prompts_fill_the_rest() -> None:
    scheduler = make_scheduler(step_tokens=6)
    scheduler.add(make_request("a", [1], max_tokens=9))
    scheduler.add(make_request("b", [2], max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("c", list(range(10, 30)), max_tokens=1))
    assert rows(scheduler.schedule()) == [("a", 0, 1, 2), ("b", 0, 1, 2), ("c", 0, 0, 4)]


def test_an_older_prompt_does_not_hold_up_a_younger_answer() -> None:
    scheduler = make_scheduler(step_tokens=10)
    scheduler.add(make_request("a", list(range(1, 20)), max_tokens=1, n=2))
    scheduler.add(make_request("b", [5], max_tokens=9))
    step(scheduler)
    step(scheduler)  # the first choice's last chunk leaves a row for b
    tasks = scheduler.schedule()
    assert rows(tasks) == [("b", 0, 1, 2), ("a", 1, 16, 19)]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "stop"),
        ({"ignore_eos": True, "max_tokens": 3}, "length"),
        ({"ignore_eos": True, "stop_token_ids": [0], "max_tokens": 3}, "stop"),
        ({"max_tokens": 1}, "stop"),
    ],
)
def test_why_it_ends(params: dict[str, object], reason: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], **params))
    assert run(scheduler, token=0)[-1].finish_reason == reason


def test_without_a_limit_the_answer_fills_the_context() -> None:
    scheduler = make_scheduler(context_tokens=10)
    scheduler.add(make_request("a", [1, 2, 3]))
    assert [event.index for event in run(scheduler)] == list(range(7))


def test_the_context_is_what_fits_into_memory() -> None:
    assert make_scheduler(num_blocks=4, context_tokens=100).context_tokens == 16
    scheduler = make_scheduler(num_blocks=4, context_tokens=100)
    scheduler.add(make_request("a", [1] * 15, max_tokens=50))
    assert len(run(scheduler)) == 1


def test_a_prompt_that_leaves_no_room_is_refused_and_leaves_no_trace() -> None:
    scheduler = make_scheduler(context_tokens=8)
    with pytest.raises(ContextOverflow, match="8 tokens") as caught:
        scheduler.add(make_request("a", [1] * 8))
    assert "at most 7" in caught.value.hint
    with pytest.raises(InvalidRequest, match="no token"):
        scheduler.add(make_request("a", []))
    assert not scheduler.busy
    assert scheduler.schedule() == []
    scheduler.check()
    scheduler.add(make_request("a", [1] * 7))
    assert len(run(scheduler)) == 1


def test_an_id_is_free_again_when_its_request_is_over() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        scheduler.add(make_request("a", [2]))
    scheduler.check()
    run(scheduler)
    scheduler.add(make_request("a", [1], max_tokens=1))
    assert len(run(scheduler)) == 1


def test_an_id_may_come_back_while_its_cancelled_step_still_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=5))
    tasks = scheduler.schedule()
    scheduler.cancel("a")
    assert scheduler.pool.num_held == 0
    scheduler.add(make_request("a", [4, 5], max_tokens=1))
    assert settle(scheduler, tasks) == [], "the old one's token must not reach the new one"
    assert [(e.index, e.finish_reason) for e in run(scheduler)] == [(0, "length")]


def test_cancel_is_always_fine() -> None:
    scheduler = make_scheduler()
    scheduler.cancel("never seen")
    scheduler.add(make_request("a", [1], max_tokens=1, n=2))
    step(scheduler)
    scheduler.cancel("a")  # the first choice is finished, the second waits
    scheduler.cancel("a")
    assert not scheduler.busy
    scheduler.check()


def test_choices_share_the_prompt_of_the_first() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(1, 10)), max_tokens=2, n=3))
    first = scheduler.schedule()
    assert rows(first) == [("a", 0, 0, 9)]
    settle(scheduler, first)
    second = scheduler.schedule()
    assert rows(second) == [("a", 0, 9, 10), ("a", 1, 8, 9), ("a", 2, 8, 9)]
    assert len({tuple(task.work.table[:2]) for task in second}) == 1
    assert len({task.work.table[2] for task in second}) == 3
    events = settle(scheduler, second) + run(scheduler)
    assert {event.num_cached_tokens for event in events} == {0}, "sharing within a request is not a cache hit"
    assert sorted((e.choice, e.index) for e in events) == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_the_next_turn_finds_prompt_and_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=4))
    run(scheduler)
    # Of the nine tokens the last was never computed: its KV would have been needed for a tenth.
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 7, 7, 7, 7, 9], max_tokens=2))
    tasks = scheduler.schedule()
    assert rows(tasks) == [("b", 0, 8, 10)]
    assert {e.num_cached_tokens for e in settle(scheduler, tasks) + run(scheduler)} == {8}


def test_a_full_hit_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    for name, cached in (("a", 0), ("b", 4)):
        scheduler.add(make_request(name, list(range(1, 9)), max_tokens=1))
        [event] = run(scheduler)
        assert event.num_cached_tokens == cached


def test_namespaces_do_not_meet() -> None:
    scheduler = make_scheduler()
    prompt = list(range(1, 10))
    cached = []
    for number, namespace in enumerate(["x", "y", "", "x"]):
        scheduler.add(make_request(f"r{number}", prompt, namespace, max_tokens=1))
        cached.append(run(scheduler)[0].num_cached_tokens)
    assert cached == [0, 0, 0, 8]


def test_the_older_takes_the_youngers_blocks_and_the_younger_goes_on_later() -> None:
    """Three blocks: both prompts take one, the older grows twice; the younger starts over once there is room."""
    scheduler = make_scheduler(num_blocks=3, context_tokens=12)
    scheduler.add(make_request("old", [1, 2, 3, 4], max_tokens=6))
    scheduler.add(make_request("young", [5, 6, 7], max_tokens=3))
    seen = []
    events = []
    while scheduler.busy:
        tasks = scheduler.schedule()
        seen.append([(name, start, stop) for name, _, start, stop in rows(tasks)])
        events += settle(scheduler, tasks)
    assert seen == [
        [("old", 0, 4), ("young", 0, 3)],
        [("old", 4, 5), ("young", 3, 4)],
        [("old", 5, 6)],  # the younger needs a second block and is the youngest: it waits with what it has
        [("old", 6, 7)],
        [("old", 7, 8)],
        [("old", 8, 9)],  # takes the younger's block
        [("young", 0, 3)],  # again from the start: the prompt in prompt form,
        [("young", 3, 5)],  # its two tokens in decode form, as they were the first time
    ]
    assert scheduler.num_preemptions == 1
    young = [event for event in events if event.request_id == "young"]
    assert [event.index for event in young] == [0, 1, 2]
    assert {event.num_cached_tokens for event in young} == {0}


def test_settle_wants_one_result_per_task_of_the_right_kind() -> None:
    scheduler = make_scheduler(step_tokens=5)
    scheduler.add(make_request("a", list(range(1, 9)), max_tokens=1))
    tasks = scheduler.schedule()
    with pytest.raises(ValueError):
        scheduler.settle(tasks, [])
    with pytest.raises(AssertionError):
        scheduler.settle(tasks, [Sampled(1)])


def test_of_a_replay_the_answer_is_not_counted_as_cached_prompt() -> None:
    scheduler = make_scheduler()
    for name in ("first", "again"):
        scheduler.add(make_request(name, [1, 2], max_tokens=12), answered={0: [7] * 9})
        events = run(scheduler)
    assert {event.num_cached_tokens for event in events} == {2}, "two blocks were found, and are mostly answer"
