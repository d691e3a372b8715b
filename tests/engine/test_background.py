"""Background requests: they run in idle steps only, give way at once, and lose nothing but time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tripool.core import Request, Slo, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Task

from .test_scheduler import make_request, make_scheduler, run, settle


def background(name: str, prompt: list[int], **params: object) -> Request:
    return replace(make_request(name, prompt, **params), slo=Slo(job=name, background=True))


def online(name: str, prompt: list[int], *, tpot_ms: float | None = None, **params: object) -> Request:
    return replace(make_request(name, prompt, **params), slo=Slo(job=name, tpot_ms=tpot_ms))


def who(tasks: list[Task]) -> set[str]:
    return {task.seq.request.id for task in tasks}


def step(scheduler: Scheduler, at_s: float = 0.0) -> set[str]:
    tasks = scheduler.schedule()
    settle(scheduler, tasks)
    scheduler.timed(tasks, at_s, at_s + 0.01)
    return who(tasks)


def test_it_pauses_while_another_request_has_work_and_goes_on_after() -> None:
    scheduler = make_scheduler()
    scheduler.add(background("b", [1, 2, 3], max_tokens=6))
    assert step(scheduler) == step(scheduler) == {"b"}
    scheduler.add(online("o", [4, 5], max_tokens=3))
    assert [step(scheduler) for _ in range(3)] == [{"o"}] * 3
    assert step(scheduler) == {"b"} and scheduler.num_preemptions == 0, "it kept its blocks"
    run(scheduler)


def test_it_does_not_start_beside_another() -> None:
    scheduler = make_scheduler()
    scheduler.add(online("o", [4, 5], max_tokens=4))
    scheduler.add(background("b", [1, 2, 3], max_tokens=2))
    assert [step(scheduler) for _ in range(4)] == [{"o"}] * 4
    assert step(scheduler) == {"b"}


def test_its_slot_goes_to_another_at_once() -> None:
    scheduler = make_scheduler(max_running=2)
    for name in "bc":
        scheduler.add(background(name, [1, 2, 3], max_tokens=9))
    assert step(scheduler) == {"b", "c"}
    scheduler.add(online("o", [4, 5], max_tokens=2))
    scheduler.add(online("p", [5, 5], max_tokens=2))
    assert step(scheduler) == {"o", "p"} and scheduler.num_preemptions == 2
    assert len(run(scheduler)) >= 2 * 8, "both are computed again"


def test_its_blocks_go_to_another_at_once() -> None:
    scheduler = make_scheduler(num_blocks=4, context_tokens=16)
    scheduler.add(background("b", list(range(1, 12)), max_tokens=5))
    assert step(scheduler) == {"b"}
    scheduler.add(online("o", list(range(20, 30)), max_tokens=2))
    assert step(scheduler) == {"o"} and scheduler.num_preemptions == 1


def test_an_older_one_takes_no_blocks_from_another() -> None:
    scheduler = make_scheduler(num_blocks=4, context_tokens=16)
    scheduler.add(background("b", [1, 2, 3], max_tokens=12))
    step(scheduler)
    scheduler.add(online("o", list(range(20, 31)), max_tokens=5))
    seen: list[set[str]] = []
    while scheduler.requests.get("o"):
        seen.append(step(scheduler))
    assert seen == [{"o"}] * 5
    run(scheduler)


def test_it_does_not_count_for_the_objectives_of_others() -> None:
    scheduler = make_scheduler(num_blocks=64, max_running=8)
    for number in range(6):
        scheduler.add(background(f"b{number}", [1, 2, number], max_tokens=20))
    step(scheduler)
    scheduler.add(online("o", [4, 5], tpot_ms=10.5, max_tokens=8))
    assert step(scheduler, 1.0) == {"o"}


def test_steps_are_short_for_a_while_after_other_work() -> None:
    scheduler = make_scheduler(num_blocks=64, step_tokens=64)
    at_s = 0.0
    for _ in range(40):  # its steps: 10 ms each
        scheduler.add(online("o", [4, 5, 6], max_tokens=2))
        while scheduler.requests:
            at_s += 0.01
            step(scheduler, at_s)
    scheduler.add(background("b", list(range(1, 61)), max_tokens=2))
    tasks = scheduler.schedule()
    short = tasks[0].work.stop
    settle(scheduler, tasks)
    scheduler.timed(tasks, at_s + 60.0, at_s + 60.01)
    assert short < 60 and scheduler.schedule()[0].work.stop == 60


@pytest.mark.parametrize("late", [False, True])
def test_tokens_do_not_depend_on_pauses(late: bool) -> None:
    def answers(with_others: bool) -> dict[tuple[str, int], list[int]]:
        scheduler, events = make_scheduler(num_blocks=6, context_tokens=20), list[TokenEvent]()
        scheduler.add(background("b", [1, 2, 3], max_tokens=9, n=2))
        for number in range(60):
            if with_others and number % (7 if late else 3) == 2:
                scheduler.add(online(f"o{number}", [9, number], max_tokens=2))
            tasks = scheduler.schedule()
            events += settle(scheduler, tasks, token=7)
        events += run(scheduler)
        found: dict[tuple[str, int], list[int]] = {}
        for event in events:
            if event.request_id == "b":
                assert event.index == len(found.setdefault((event.request_id, event.choice), []))
                found[event.request_id, event.choice].append(event.token_id)
        return found

    assert answers(True) == answers(False)


def test_the_end_of_a_background_request_does_not_shorten_the_steps_of_the_next() -> None:
    """Short steps are for the first token of online requests; a batch that has ended is none."""
    scheduler = make_scheduler()
    scheduler.add(background("b", [1, 2, 3], max_tokens=2))
    assert [step(scheduler, at_s) for at_s in (0.0, 0.1)] == [{"b"}] * 2
    scheduler.add(background("c", [4, 5, 6], max_tokens=4))
    assert step(scheduler, 0.2) == {"c"} and scheduler.background.prompt_tokens(1000) == 1000
    scheduler.add(online("o", [7, 8], max_tokens=1))
    assert step(scheduler, 0.3) == {"o"} and step(scheduler, 0.4) == {"c"}
    assert scheduler.background.prompt_tokens(1000) < 1000
