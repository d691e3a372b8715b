"""The scheduler under promises: everything it owes without them, and nobody waits for one for ever."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

import pytest

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo, TokenEvent
from tripool.decode import StepFacts, slo_controller
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Task

from .scheduler_sim import Simulation
from .test_scheduler_properties import SchedulerMachine, run_machine

PACES_MS = (None, 0.01, 1.6, 3.0, None, 10.0, 1000.0)
"""Without a promise, impossible, barely possible alone, possible for some, for many, for all."""


def step_s(tasks: list[Task], noise: float = 1.0) -> float:
    facts = StepFacts.of(tasks)
    return (1.0 + 0.5 * facts.rows + 0.1 * facts.prompt_tokens) * noise / 1000


class PromisedSimulation(Simulation):
    """In seconds as well: what the scheduler is told, and how long the head of the queue is held back at most."""

    def __init__(self, config: SchedulerConfig, context_tokens: int, draft_quality: float | None = None) -> None:
        super().__init__(config, context_tokens, draft_quality)
        self.random = Random(f"{config} {context_tokens}")
        self.now_s = 0.0
        self.head: tuple[object, float] | None = None
        self.longest_s = 0.0

    def begin(self) -> list[Task]:
        tasks = super().begin()
        self._check_patience()
        return tasks

    def end(self) -> list[TokenEvent]:
        tasks = self.in_flight
        assert tasks is not None
        took_s = step_s(tasks, self.random.choice([0.9, 1.0, 1.0, 1.1, 40.0]))
        self.longest_s = max(self.longest_s, took_s)
        events = super().end()
        if tasks:
            self.scheduler.timed(tasks, self.now_s, self.now_s + took_s)
        self.now_s += took_s
        self.scheduler.check()
        return events

    def _check_patience(self) -> None:
        ready = [seq for seq in self.scheduler.prefill.waiting if self.shadows[seq].may_start]
        if not (ready and self.scheduler.slo_controller.held_back):
            self.head = None
            return
        self.seen["held back for a promise"] += 1
        if self.head is None or self.head[0] is not ready[0]:
            self.head = ready[0], self.now_s
        assert self.now_s - self.head[1] <= slo_controller._PATIENCE_S + self.longest_s, "a promise starves the queue"


class PromisedMachine(SchedulerMachine):
    seen: ClassVar[Counter[str]] = Counter()

    def new_simulation(self, config: SchedulerConfig, context_tokens: int, draft_quality: float | None) -> Simulation:
        return PromisedSimulation(config, context_tokens, draft_quality)

    def slo(self) -> Slo:
        tpot_ms = PACES_MS[(self.num_requests * 5 + sum(self.shared)) % len(PACES_MS)]
        return Slo(tpot_ms=tpot_ms, ttft_ms=50.0 if self.num_requests % 4 == 0 else None)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "sim"):
            scheduler = self.sim.scheduler
            assert not scheduler.slo_controller.active and scheduler.slo_controller.ceiling is None
            type(self).seen += self.sim.seen
            self.seen["given up"] += scheduler.slo_controller.num_given_up


def test_any_history_with_promises_keeps_every_other_promise() -> None:
    PromisedMachine.seen.clear()
    run_machine(max_examples=80, steps=40, machine=PromisedMachine)
    for event in ("held back for a promise", "given up", "preempted", "accepted", "cancelled"):
        assert PromisedMachine.seen[event] >= 5, f"{event}: only {PromisedMachine.seen[event]} times"


@pytest.mark.prove
def test_any_history_with_promises_keeps_every_other_promise_at_length() -> None:
    run_machine(max_examples=800, steps=80, machine=PromisedMachine)


# ---- told step by step ----------------------------------------------------------------------------------------------


def request(name: str, tpot_ms: float | None, *, prompt: int = 40, answer: int = 30) -> Request:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    slo = Slo(tpot_ms=tpot_ms)
    return Request(id=name, prompt_ids=(len(name), *range(2, prompt + 1)), params=params, seed=0, slo=slo)


class Bench:
    """A scheduler, and a clock that goes on by what its steps cost."""

    def __init__(self, max_running: int = 64) -> None:
        config = SchedulerConfig(num_blocks=512, max_running=max_running, step_tokens=512, prefix_reuse=False)
        self.scheduler = Scheduler(config, model="m", context_tokens=4096)
        self.now_s = 0.0
        self.times: dict[str, list[float]] = {}
        self.plans: list[list[tuple[str, int, int]]] = []

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)

    def step(self) -> list[Task]:
        tasks = self.scheduler.schedule()
        began_s = self.now_s
        self.now_s += step_s(tasks)
        for event in self.scheduler.settle(tasks, [Sampled(1) if task.samples else None for task in tasks]):
            self.times.setdefault(event.request_id, []).append(self.now_s)
        self.scheduler.timed(tasks, began_s, self.now_s)
        self.scheduler.check()
        self.plans.append([(t.seq.request.id, t.work.start, t.work.stop) for t in tasks])
        return tasks

    def run(self, steps: int | None = None) -> None:
        while self.scheduler.busy and (steps is None or steps > 0):
            self.step()
            steps = None if steps is None else steps - 1

    def mean_ms(self, name: str) -> float:
        times = self.times[name]
        return (times[-1] - times[0]) / (len(times) - 1) * 1000


def warmed() -> Bench:
    """It has seen a few dozen steps of many shapes, none of them promised anything."""
    bench = Bench()
    for number in range(24):
        bench.add(request(f"w{number}", None, prompt=10 + number * 7, answer=20 + number * 5))
        bench.run(4)
    bench.run()
    return bench


def test_a_class_is_kept_where_the_plain_scheduler_breaks_it() -> None:
    def serve(told: bool) -> Bench:
        bench = warmed()
        for number in range(40):
            bench.add(request(f"r{number}", 6.0 if told else None))
        bench.run()
        return bench

    def kept(bench: Bench) -> int:
        return sum(bench.mean_ms(f"r{number}") <= 6.0 for number in range(40))

    assert kept(serve(told=True)) == 40
    assert kept(serve(told=False)) < 10


def test_the_ceiling_is_told_while_a_promise_is_there() -> None:
    bench = warmed()
    assert bench.scheduler.slo_controller.ceiling is None
    bench.add(*(request(f"r{number}", 6.0) for number in range(40)))
    bench.run(30)
    ceiling = bench.scheduler.slo_controller.ceiling
    assert ceiling is not None and 4 <= ceiling <= 10, "a step of ten rows takes six milliseconds"
    assert bench.scheduler.slo_controller.held_back
    assert len(bench.scheduler.decode.running) <= 10
    bench.run()
    assert bench.scheduler.slo_controller.ceiling is None and not bench.scheduler.slo_controller.held_back


def test_a_prompt_comes_in_pieces_that_the_tightest_answer_bears() -> None:
    bench = warmed()
    bench.add(request("strict", 3.0, answer=400))
    bench.run(10)
    bench.add(request("long", None, prompt=1000, answer=1))
    bench.run()
    pieces = [stop - start for plan in bench.plans for name, start, stop in plan if name == "long"]
    assert len(pieces) > 10 and sum(pieces) == 1000
    assert bench.mean_ms("strict") <= 3.0
    assert "strict" in bench.times and len(bench.times["strict"]) == 400


def test_slack_that_was_earned_is_spent() -> None:
    """An answer that ran alone for a while bears a larger piece than one that has just begun."""

    def first_piece(steps_alone: int) -> int:
        bench = warmed()
        bench.add(request("strict", 6.0, answer=400))
        bench.run(steps_alone)
        bench.add(request("long", None, prompt=1000, answer=1))
        bench.step()
        return max(stop - start for name, start, stop in bench.plans[-1] if name == "long")

    assert first_piece(steps_alone=60) >= 2 * first_piece(steps_alone=3)


@pytest.mark.parametrize("tpot_ms", [0.0, 0.01, 1.0])
def test_an_impossible_promise_holds_nobody_up(tpot_ms: float) -> None:
    plain, bench = warmed(), warmed()
    for each in (plain, bench):
        each.add(request("hopeless", tpot_ms if each is bench else None, answer=100))
        each.run(5)
        each.add(*(request(f"r{number}", None) for number in range(20)))
        each.run()
    assert bench.scheduler.slo_controller.num_given_up == 1
    assert bench.plans == plain.plans, "it runs as it comes, as if nothing had been promised"


def test_an_impossible_promise_starves_nobody_before_anything_was_learned() -> None:
    bench = Bench()
    bench.add(*(request(f"r{number}", 0.01, answer=50) for number in range(30)))
    bench.add(request("last", None))
    bench.run()
    assert len(bench.times) == 31 and bench.scheduler.slo_controller.num_given_up == 30


def test_the_first_promise_of_all_starts_small() -> None:
    """Nothing is known of this machine: a full batch of strict answers would be a bet."""
    bench = Bench()
    bench.add(*(request(f"r{number}", 6.0) for number in range(40)))
    bench.step()
    assert len(bench.plans[0]) <= 4
    bench.run()
    assert sum(bench.mean_ms(f"r{number}") <= 6.0 for number in range(40)) >= 38


def test_a_strict_newcomer_waits_until_it_can_be_kept_and_a_patient_time_at_most() -> None:
    bench = warmed()
    bench.add(*(request(f"r{number}", None, answer=100 + 8 * number) for number in range(30)))
    bench.run(10)
    assert len(bench.scheduler.decode.running) == 30
    bench.add(request("strict", 8.0, answer=50))
    bench.run(40)
    assert "strict" not in bench.times, "a step takes twice its promise"
    bench.run()
    assert bench.mean_ms("strict") <= 8.0
    endless = warmed()
    endless.add(*(request(f"r{number}", None, answer=3000) for number in range(30)))
    endless.run(10)
    endless.add(request("strict", 8.0, answer=50))
    asked_s = endless.now_s
    while "strict" not in endless.times:
        endless.step()
    assert slo_controller._PATIENCE_S <= endless.now_s - asked_s <= slo_controller._PATIENCE_S + 0.1


def test_without_promises_times_change_nothing() -> None:
    """The same plans whatever the steps took, and whether anybody said so."""
    traces = []
    for noise in (None, 1.0, 1000.0):
        random, config = Random(7), SchedulerConfig(num_blocks=24, block_tokens=4, max_running=5, step_tokens=20)
        scheduler = Scheduler(config, model="m", context_tokens=64)
        trace, now_s, num_added = [], 0.0, 0
        while num_added < 60 or scheduler.busy:
            if num_added < 60 and random.random() < 0.4:
                scheduler.add(
                    request(f"r{num_added}", None, prompt=random.randint(1, 30), answer=random.randint(1, 20))
                )
                num_added += 1
            tasks = scheduler.schedule()
            trace.append([(t.seq.order, t.work.start, t.work.stop) for t in tasks])
            scheduler.settle(tasks, [Sampled(1) if task.samples else None for task in tasks])
            if noise is not None:
                scheduler.timed(tasks, now_s, now_s + step_s(tasks, noise))
                now_s += step_s(tasks, noise)
            scheduler.check()
        traces.append(trace)
        assert scheduler.num_preemptions > 0
    assert traces[0] == traces[1] == traces[2]


def test_what_is_handed_over_after_its_first_token_binds_no_prompt() -> None:
    """A prefill worker promises no pace: its answers go on elsewhere."""
    bench = warmed()
    bench.add(*(request(f"r{number}", 3.0, prompt=30) for number in range(12)))
    bench.step()
    for name in list(bench.times)[24:]:
        bench.scheduler.release(bench.scheduler.detach(name, 0))
    bench.add(*(request(f"s{number}", 3.0, prompt=30) for number in range(12)))
    assert len(bench.step()) >= 12
    bench.scheduler.check()


def test_an_answer_that_comes_from_elsewhere_is_let_in_by_the_same_rule() -> None:
    bench = warmed()
    scheduler = bench.scheduler
    running = []
    for number in range(20):
        seq = scheduler.attach(request(f"r{number}", 6.0, answer=60), 0, [1], 40)
        if seq is None:
            break
        scheduler.start(seq)
        running.append(seq)
        bench.run(2)
    assert 4 <= len(running) <= 11, "eleven rows take longer than was promised"
    assert scheduler.slo_controller.held_back
    bench.run()
    assert all(bench.mean_ms(seq.request.id) <= 6.0 for seq in running)
