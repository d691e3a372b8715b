"""Pools in virtual time as flows of work, for the autoscaler's tests: drawn traffic in, facts out, actions obeyed.

Prompts are tokens per second; contexts are a number that arrivals raise and departures lower. Starts take minutes, some
never come, conversions take seconds, workers die.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import pi, sin
from random import Random

from tripool.config import AutoscaleConfig
from tripool.control.autoscaler import Autoscaler
from tripool.control.scaling import Convert, Decision, GiveUp, Load, Pool, Stage, Start, Stop, Worker

EVERY_S = 15
STEP_S, TOKEN_S = 0.08, 1.5e-5
CEILING, SLOTS = 100, 128
Traffic = Callable[[int], tuple[float, float]]
"""(requests per second, seconds that an answer takes) at a second."""


def drawn_traffic(rng: Random, length_s: int) -> Traffic:
    """A base with a slow wave, steps, spikes, a zigzag, silence, each with its own odds."""
    base = rng.choice([0.2, 2.0, 10.0, 40.0])
    wave, period_s, phase = rng.uniform(0.0, 0.8), rng.uniform(1200.0, 7200.0), rng.uniform(0.0, 2 * pi)
    steps = [(rng.uniform(0, length_s), rng.choice([0.3, 0.6, 1.5, 3.0])) for _ in range(rng.randrange(4))]
    spikes = [(rng.uniform(0, length_s), rng.uniform(20, 200), rng.uniform(2, 6)) for _ in range(rng.randrange(3))]
    zigzag_s = rng.choice([0.0, 0.0, 120.0, 600.0])
    silent_s = rng.uniform(0, length_s) if rng.random() < 0.3 else length_s
    answers_s = rng.choice([10.0, 40.0, 120.0])

    def at(second: int) -> tuple[float, float]:
        rate = base * (1.0 + wave * sin(2 * pi * second / period_s + phase))
        for begin_s, factor in steps:
            rate *= factor if second >= begin_s else 1.0
        for begin_s, long_s, factor in spikes:
            rate *= factor if begin_s <= second < begin_s + long_s else 1.0
        if zigzag_s and second // zigzag_s % 2:
            rate *= 2.0
        return (0.0 if silent_s <= second < silent_s + 900 else rate), answers_s

    return at


@dataclass
class _Unit:
    worker: Worker
    until_s: float = 0.0
    """When its stage ends, where it does by itself."""


@dataclass
class Flow:
    """`prompts`: tokens of each; `start_s`: how long starts take, drawn; None: this one never comes."""

    config: AutoscaleConfig
    traffic: Traffic
    rng: Random
    workers: tuple[int, int] = (1, 1)
    prompt_tokens: float = 1500.0
    start_s: Callable[[Random], float | None] = lambda rng: None if rng.random() < 0.05 else rng.uniform(60.0, 300.0)
    deaths: float = 0.0
    """Per worker and report."""
    converts: bool = True
    decisions: list[Decision] = field(default_factory=list)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, prefill, decode) that were ready."""
    given_up: int = 0

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.config)
        self.now_s = 0
        self.contexts = 0.0
        self.units: dict[str, _Unit] = {}
        for pool, count in zip(("prefill", "decode"), self.workers, strict=True):
            for _ in range(count):
                self._add(pool, "ready")

    def _add(self, pool: Pool, stage: Stage) -> _Unit:
        name = f"unit-{len(self.units) + 1000 * self.now_s}"
        worker = Worker(
            name=name, pool=pool, stage=stage, since_s=float(self.now_s), converts=self.converts, slots=SLOTS
        )  # type: ignore[arg-type]
        self.units[name] = _Unit(worker)
        return self.units[name]

    def ready(self, pool: str) -> list[_Unit]:
        return [unit for unit in self.units.values() if unit.worker.pool == pool and unit.worker.stage == "ready"]

    def run(self, length_s: int) -> None:
        while self.now_s < length_s:
            self._report()

    def _report(self) -> None:
        tokens, arrived, left = [], 0, 0.0
        for _ in range(EVERY_S):
            rate, answers_s = self.traffic(self.now_s)
            whole = int(rate) + (self.rng.random() < rate % 1.0)
            tokens.append(whole * self.prompt_tokens)
            running = min(self.contexts, SLOTS * len(self.ready("decode")))
            gone = running / answers_s
            arrived, left, self.contexts = arrived + whole, left + gone, self.contexts + whole - gone
            self.now_s += 1
            self._pass()
        workers = self._facts()
        running = sum(worker.contexts for worker in workers)
        load = Load(
            now_s=float(self.now_s), prompt_tokens=tokens, prompt_cost_s=(STEP_S, TOKEN_S), first_tokens=arrived,
            waiting_contexts=max(0, round(self.contexts) - running), answers=round(left),
        )  # fmt: skip
        self.autoscaler.observe(load, workers)
        decision = self.autoscaler.decide(float(self.now_s), workers)
        if decision is not None:
            self.decisions.append(decision)
            self.obey(decision)
        self.autoscaler.check()
        self.sizes.append((self.now_s, len(self.ready("prefill")), len(self.ready("decode"))))

    def _facts(self) -> Sequence[Worker]:
        ready = self.ready("decode")
        each = min(SLOTS, round(self.contexts / len(ready))) if ready else 0
        for unit in self.units.values():
            there = unit in ready
            fresh = self.now_s - unit.worker.since_s < self.config.first_samples_s
            ceiling = (4 if fresh else CEILING) if there else None  # cold samples are far too low
            unit.worker = replace(unit.worker, contexts=each if there else 0, ceiling=ceiling)
        return [unit.worker for unit in self.units.values()]

    def _pass(self) -> None:
        for name, unit in list(self.units.items()):
            worker = unit.worker
            if worker.stage == "ready" and self.rng.random() < self.deaths / EVERY_S:
                del self.units[name]
            elif worker.stage == "starting" and self.now_s >= unit.until_s:
                unit.worker = replace(worker, stage="ready", since_s=float(self.now_s), converting=False)
            elif worker.stage == "leaving" and self.now_s >= unit.until_s:
                del self.units[name]

    def obey(self, decision: Decision) -> None:
        """What was decided is possible, or it is an error of the autoscaler."""
        touched: set[str] = set()
        for action in decision.actions:
            if isinstance(action, Start):
                start_s = self.start_s(self.rng)
                unit = self._add(action.pool, "starting")
                unit.until_s = float("inf") if start_s is None else self.now_s + start_s
                continue
            assert action.worker not in touched, f"{action.worker} is to do two things"
            touched.add(action.worker)
            unit = self.units[action.worker]
            worker = unit.worker
            if isinstance(action, Convert):
                assert worker.stage == "ready" and worker.converts and worker.pool != action.to
                unit.worker = replace(
                    worker, pool=action.to, stage="starting", converting=True, since_s=float(self.now_s)
                )
                unit.until_s = self.now_s + self.rng.uniform(1.0, 5.0)
            elif isinstance(action, GiveUp):
                waited_s = self.now_s - worker.since_s
                assert worker.stage == "starting" and waited_s > self.config.start_deadline_s
                self.given_up += 1
                del self.units[action.worker]
            elif worker.stage == "starting":
                del self.units[action.worker]
            else:
                assert isinstance(action, Stop) and worker.stage == "ready"
                unit.worker = replace(worker, stage="leaving", since_s=float(self.now_s))
                unit.until_s = self.now_s + self.rng.uniform(1.0, 60.0)
        assert (decision.bound and decision.actions) or decision.after != decision.before
