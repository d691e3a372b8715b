"""SLO classes in virtual time: the scheduler that serves, on steps whose time comes from a cost formula.

Measures `decode/slo_controller.py` without a clock: the same arrivals through it, and through a scheduler without SLOs
under one fixed batch limit after the other. Used by `slo.py` and by `tests/decode/test_slo_classes.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.decode import StepFacts
from tripool.engine.scheduler import Scheduler
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Refuse
from tripool.router.admission_types import Arrival as PendingRequest
from tripool.sequence import Sampled
from tripool.simulate.rng import Rng

KEPT = 0.99
"""Share of a class's answers that must meet its SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    fixed_s: float = 0.005
    row_s: float = 0.0004
    context_token_s: float = 2e-7
    prompt_token_s: float = 5e-5
    jitter: float = 0.0
    """Every step takes up to this share more or less."""
    hiccup: float = 0.0
    """Chance that a step takes five times as long."""

    def step_s(self, facts: StepFacts, rng: Rng) -> float:
        step_s = self.fixed_s + self.row_s * (facts.rows + facts.drafts)
        step_s += self.context_token_s * (facts.context_tokens + facts.prompt_reads / 8)
        step_s += self.prompt_token_s * facts.prompt_tokens
        step_s *= rng.uniform(1 - self.jitter, 1 + self.jitter)
        return step_s * 5 if rng.chance(self.hiccup) else step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one class asks for. Lengths are drawn between half and one and a half of these."""

    tpot_ms: float | None
    share: float
    prompt_tokens: int
    answer_tokens: int
    ttft_ms: float | None = None


def _mix(strict: float, middle: float, relaxed: float) -> tuple[Kind, ...]:
    """Shares of the three classes. The stricter, the shorter: talk, work, documents."""
    kinds = (
        Kind(tpot_ms=15.0, share=strict, prompt_tokens=200, answer_tokens=60, ttft_ms=2000.0),
        Kind(tpot_ms=30.0, share=middle, prompt_tokens=400, answer_tokens=100, ttft_ms=4000.0),
        Kind(tpot_ms=50.0, share=relaxed, prompt_tokens=800, answer_tokens=150, ttft_ms=8000.0),
    )
    return tuple(kind for kind in kinds if kind.share)


MIXES: dict[str, tuple[tuple[Kind, ...], ...]] = {
    "steady": (_mix(0.2, 0.3, 0.5),),
    "shifting": (_mix(0.4, 0.3, 0.3), _mix(0, 0.3, 0.7), _mix(0.2, 0.5, 0.3), _mix(0, 0, 1)),
}
"""All classes all the time; and traffic that is now of one kind, now of another."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Served:
    tpot_ms: float | None
    ttft_ms: float | None
    """The SLO of the request, also when the scheduler did not know it."""
    ttft_s: float
    mean_s: float
    """Per token after the first."""
    num_tokens: int

    @property
    def kept(self) -> bool:
        """Time per token, which the scheduler controls."""
        return self.tpot_ms is None or self.mean_s * 1000 <= self.tpot_ms

    @property
    def in_time(self) -> bool:
        """Time to first token, which admission controls."""
        return self.ttft_ms is None or self.ttft_s * 1000 <= self.ttft_ms


@dataclass(frozen=True, slots=True)
class Run:
    served: tuple[Served, ...]
    wall_s: float
    num_steps: int
    refused_s: tuple[float, ...] = ()
    """From arrival to refusal."""
    num_given_up: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.served) / self.wall_s

    def in_time(self) -> float:
        """Share of the answers that met their TTFT."""
        return sum(each.in_time for each in self.served) / max(1, len(self.served))

    def attainment(self) -> dict[float, float]:
        """By class: the share of its answers that met its TPOT."""
        kept: dict[float, list[bool]] = {}
        for each in self.served:
            if each.tpot_ms is not None:
                kept.setdefault(each.tpot_ms, []).append(each.kept)
        return {tpot_ms: sum(each) / len(each) for tpot_ms, each in sorted(kept.items())}

    @property
    def worst(self) -> float:
        return min(self.attainment().values(), default=1.0)


def draw(phases: Sequence[Sequence[Kind]], count: int, rng: Rng, *, per_s: float | None = None) -> list[Arrival]:
    """`count` requests; the mix changes from phase to phase, each with an equal number of them.

    `per_s`: how many come per second, in a Poisson stream. None: all are there at once.
    """
    arrivals, now_s = [], 0.0
    for number in range(count):
        kinds = phases[number * len(phases) // count]
        throw, kind = rng.uniform(0, sum(kind.share for kind in kinds)), kinds[-1]
        for each in kinds:
            throw -= each.share
            if throw < 0:
                kind = each
                break
        now_s += -log(1 - rng.uniform(0, 1)) / per_s if per_s is not None else 0.0
        prompt = max(1, int(kind.prompt_tokens * rng.uniform(0.5, 1.5)))
        answer = max(1, int(kind.answer_tokens * rng.uniform(0.5, 1.5)))
        request = Request(
            id=str(number),
            prompt_ids=tuple([number % 1000 + 1] * prompt),
            params=SamplingParams(max_tokens=answer, ignore_eos=True),
            seed=0,
            slo=Slo(tpot_ms=kind.tpot_ms, ttft_ms=kind.ttft_ms),
        )
        arrivals.append(Arrival(now_s, request))
    return arrivals


class _Engine:
    """One engine from the first arrival to the last token."""

    def __init__(
        self, arrivals: Sequence[Arrival], config: SchedulerConfig, admission: AdmissionController | None
    ) -> None:
        self._arrivals, self._admission = deque(arrivals), admission
        self._requests = {arrival.request.id: arrival.request for arrival in arrivals}
        self.scheduler = Scheduler(config, model="made-up", context_tokens=config.num_blocks * config.block_tokens)
        self.now_s = 0.0
        self.times: dict[str, list[float]] = {name: [] for name in self._requests}
        self.refused: dict[str, float] = {}
        """Request id -> time of the refusal."""

    @property
    def busy(self) -> bool:
        return bool(self._arrivals) or self.scheduler.busy

    def arrive(self) -> None:
        if not self.scheduler.busy:
            self.now_s = max(self.now_s, self._arrivals[0].at_s)
        while self._arrivals and self._arrivals[0].at_s <= self.now_s:
            arrival = self._arrivals.popleft()
            request = arrival.request
            if self._admission is None:
                self.scheduler.add(request)
                continue
            pending = PendingRequest(id=request.id, prompt_tokens=len(request.prompt_ids), slo=request.slo)
            self._apply(self._admission.arrive(pending, arrival.at_s), arrival.at_s)

    def step(self, cost: StepCost, rng: Rng) -> None:
        tasks = self.scheduler.schedule()
        assert tasks or not self.scheduler.busy, "the scheduler is busy and schedules nothing"
        began_s = self.now_s
        self.now_s += cost.step_s(StepFacts.of(tasks), rng)
        for event in self.scheduler.settle(tasks, [Sampled(1) if task.samples else None for task in tasks]):
            self.times[event.request_id].append(self.now_s)
            if self._admission is not None and event.index == 0:
                uncached = len(self._requests[event.request_id].prompt_ids)
                self._apply(self._admission.first_token(event.request_id, uncached, self.now_s), self.now_s)
            if self._admission is not None and event.finish_reason is not None:
                self._apply(self._admission.finished(event.request_id, event.index + 1, self.now_s), self.now_s)
        self.scheduler.timed(tasks, began_s, self.now_s)
        if self._admission is not None:
            self._apply(self._admission.tick(self.now_s), self.now_s)

    def _apply(self, decisions: Iterable[Admit | Refuse], now_s: float) -> None:
        for decision in decisions:
            if isinstance(decision, Refuse):
                self.refused[decision.id] = now_s
            else:
                self.scheduler.add(self._requests[decision.id])


def run(
    arrivals: Sequence[Arrival],
    config: SchedulerConfig,
    cost: StepCost,
    *,
    promised: bool = True,
    admission: AdmissionController | None = None,
    seed: int = 0,
) -> Run:
    """`promised`: whether the scheduler knows the SLOs. `admission`: admits or refuses before the scheduler."""
    known = arrivals if promised else [replace(a, request=replace(a.request, slo=Slo())) for a in arrivals]
    engine, rng, num_steps = _Engine(known, config, admission), Rng(seed), 0
    while engine.busy:
        engine.arrive()
        engine.step(cost, rng)
        num_steps += 1
    served = tuple(_served(a, engine.times[a.request.id]) for a in arrivals if a.request.id not in engine.refused)
    refused = tuple(engine.refused[a.request.id] - a.at_s for a in arrivals if a.request.id in engine.refused)
    return Run(served, engine.now_s, num_steps, refused, engine.scheduler.slo_controller.num_given_up)


def _served(arrival: Arrival, came: Sequence[float]) -> Served:
    mean_s = (came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else 0.0
    slo = arrival.request.slo
    return Served(slo.tpot_ms, slo.ttft_ms, came[0] - arrival.at_s, mean_s, len(came))


def best_fixed(
    arrivals: Sequence[Arrival], configs: Iterable[SchedulerConfig], cost: StepCost
) -> tuple[SchedulerConfig | None, Run | None]:
    """Of the fixed limits that keep every class, the one with the most throughput."""
    best: tuple[SchedulerConfig | None, Run | None] = None, None
    for config in configs:
        done = run(arrivals, config, cost, promised=False)
        if done.worst >= KEPT and (best[1] is None or done.tokens_per_s > best[1].tokens_per_s):
            best = config, done
    return best
