"""A backend in virtual time for tests of admission: prompts one after another, answers in parallel."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from tripool.config import AdmissionConfig
from tripool.core import Slo
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision, Refuse
from tripool.router.rate_limiter import RateLimiter
from tripool.tenants import Limits, Tenant

TICK_S = 0.05


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(name=name, namespace=name, limits=Limits(**limits))


@dataclass(frozen=True)
class Ask:
    time_s: float
    arrival: Arrival
    uncached_tokens: int
    answer_s: float = 0.0
    """How long its slot is taken after the first token."""


@dataclass
class Outcome:
    ask: Ask
    admitted_s: float | None = None
    first_s: float | None = None
    refused_s: float | None = None
    error: Any = None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.ask.time_s


@dataclass
class Model:
    """`tokens_per_s` of each lane, `overhead_s` per prompt, `slots` answers at once."""

    admission: AdmissionController
    tokens_per_s: float = 1000.0
    overhead_s: float = 0.002
    slots: int = 10**9
    check_every: int = 1
    now_s: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _events: list[tuple[float, int, str, str]] = field(default_factory=list)
    _serial: int = 0
    _queue: deque[str] = field(default_factory=deque)
    _computing: int = 0
    _answering: int = 0
    _cancelled: set[str] = field(default_factory=set)

    def run(self, asks: Iterable[Ask], until_s: float | None = None) -> dict[str, Outcome]:
        for ask in asks:
            self.outcomes[ask.arrival.id] = Outcome(ask)
            self._at(ask.time_s, "arrive", ask.arrival.id)
        self._at(0.0, "tick", "")
        num_events = 0
        while self._events and (until_s is None or self._events[0][0] <= until_s):
            self.now_s, _, kind, request_id = heappop(self._events)
            getattr(self, f"_{kind}")(request_id)
            num_events += 1
            if num_events % self.check_every == 0:
                self.admission.check(self.now_s)
        return self.outcomes

    def _at(self, time_s: float, kind: str, request_id: str) -> None:
        self._serial += 1
        heappush(self._events, (time_s, self._serial, kind, request_id))

    def _do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            outcome = self.outcomes[decision.id]
            assert outcome.admitted_s is None and outcome.refused_s is None, "decided twice"
            if isinstance(decision, Admit):
                outcome.admitted_s = self.now_s
                self._queue.append(decision.id)
            else:
                outcome.refused_s, outcome.error = self.now_s, decision.error
        self._work()

    def _work(self) -> None:
        while self._queue and self._computing < self.admission.room.lanes and self._answering < self.slots:
            request_id = self._queue.popleft()
            self._computing += 1
            self._answering += 1
            tokens = self.outcomes[request_id].ask.uncached_tokens
            self._at(self.now_s + self.overhead_s + tokens / self.tokens_per_s, "first", request_id)

    def _arrive(self, request_id: str) -> None:
        self._do(self.admission.arrive(self.outcomes[request_id].ask.arrival, self.now_s))

    def _first(self, request_id: str) -> None:
        outcome = self.outcomes[request_id]
        self._computing -= 1
        outcome.first_s = self.now_s
        self._at(self.now_s + outcome.ask.answer_s, "end", request_id)
        self._do(self.admission.first_token(request_id, outcome.ask.uncached_tokens, self.now_s))

    def _end(self, request_id: str) -> None:
        self._answering -= 1
        self._do(self.admission.finished(request_id, 1, self.now_s))

    def _tick(self, _: str) -> None:
        self._do(self.admission.tick(self.now_s))
        if self._events:
            self._at(self.now_s + TICK_S, "tick", "")


def new_admission(
    *, lanes: int = 1, slots: int | None = None, rate_limiter: RateLimiter | None = None, **config: Any
) -> AdmissionController:
    return AdmissionController(AdmissionConfig(**config), rate_limiter, Capacity(lanes, slots))


def poisson(
    owner: Tenant,
    rate_per_s: float,
    until_s: float,
    seed: int,
    *,
    tokens: int = 100,
    answer_s: float = 0.0,
    ttft_ms: float | None = None,
) -> list[Ask]:
    rng, asks, now_s = Random(seed), [], 0.0
    while (now_s := now_s + rng.expovariate(rate_per_s)) < until_s:
        slo = Slo(ttft_ms=ttft_ms, tenant=owner.name)
        arrival = Arrival(id=f"{owner.name}-{len(asks)}", prompt_tokens=tokens, tenant=owner, slo=slo)
        asks.append(Ask(now_s, arrival, tokens, answer_s))
    return asks


def by_tenant(outcomes: dict[str, Outcome]) -> dict[str, list[Outcome]]:
    found: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes.values():
        found[outcome.ask.arrival.tenant.name].append(outcome)
    return found


def refusals(decisions: list[Decision]) -> list[Refuse]:
    return [decision for decision in decisions if isinstance(decision, Refuse)]


def admitted(decisions: list[Decision]) -> list[str]:
    return [decision.id for decision in decisions if isinstance(decision, Admit)]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
