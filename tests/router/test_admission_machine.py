"""Whatever happens in whatever order: who arrives is admitted or refused once, and nothing is kept of who left."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.admission_model import new_admission, tenant
from tripool.core import Slo
from tripool.errors import AboveRateLimit
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision, Refuse
from tripool.router.rate_limiter import RateLimiter

OWNERS = [
    tenant("", weight=1.0),
    tenant("light", weight=0.2),
    tenant("heavy", weight=5.0, requests_per_minute=20),
    tenant("slow", tokens_per_minute=2000),
]
MAX_WAIT_S = 5.0


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.ticked_s = self.now_s
        self.number = 0
        self.waiting: dict[str, float] = {}
        self.prefilling: list[str] = []
        self.answering: list[str] = []
        self.prompts: dict[str, int] = {}
        self.later: dict[str, str] = {}
        """Prompts that have not arrived: behind another one of the same request."""

    @initialize(
        lanes=st.integers(1, 3),
        slots=st.sampled_from([None, 1, 4, 16]),
        queue_tokens=st.sampled_from([300, 3000, 10**6]),
        wide_tokens=st.sampled_from([1, 200, 10_000]),
    )
    def build(self, lanes: int, slots: int | None, queue_tokens: int, wide_tokens: int) -> None:
        self.rate_limiter = RateLimiter()
        self.admission = new_admission(
            lanes=lanes,
            slots=slots,
            rate_limiter=self.rate_limiter,
            queue_tokens=queue_tokens,
            wide_tokens=wide_tokens,
            max_wait_s=MAX_WAIT_S,
            compete_s=3.0,
        )

    def do(self, decisions: list[Decision]) -> None:
        self.follow()
        for decision in decisions:
            if decision.id not in self.waiting:  # it arrived behind another one that was let through
                del self.later[decision.id]
            else:
                del self.waiting[decision.id]  # each is decided once
            if isinstance(decision, Admit):
                self.prefilling.append(decision.id)
            elif isinstance(decision.error, AboveRateLimit):
                assert decision.error.status == 400 and decision.error.hint
            else:
                assert decision.error.status == 429 and decision.error.hint
                assert decision.error.retry_after_s > 0  # type: ignore[attr-defined]
        self.follow()

    def follow(self) -> None:
        """Prompts that arrived behind another one of their request wait now."""
        for request_id in [i for i in self.later if i in self.admission]:
            del self.later[request_id]
            self.waiting[request_id] = self.now_s

    @rule(
        owner=st.sampled_from(OWNERS),
        tokens=st.integers(1, 800),
        choices=st.integers(1, 3),
        priority=st.integers(-1, 1),
        ttft_ms=st.sampled_from([None, None, 50.0, 2000.0]),
        more=st.sampled_from([0, 0, 0, 1, 4]),
    )
    def arrive(self, owner: object, tokens: int, choices: int, priority: int, ttft_ms: float | None, more: int) -> None:
        self.number += 1
        request_id = f"r{self.number}"
        slo = Slo(priority=priority, ttft_ms=ttft_ms)
        self.waiting[request_id], self.prompts[request_id] = self.now_s, tokens
        if self.admission.enter(owner, self.now_s) is not None:  # type: ignore[arg-type]
            del self.waiting[request_id]
            return
        came = Arrival(id=request_id, prompt_tokens=tokens, tenant=owner, choices=choices, slo=slo)  # type: ignore[arg-type]
        later = [replace(came, id=f"{request_id}.{n}") for n in range(more)]
        self.prompts |= {one.id: tokens for one in later}
        decisions = self.admission.arrive(came, self.now_s, later)
        self.later |= {} if _refuses(decisions, came) else {one.id: request_id for one in later}
        self.do(decisions)

    @precondition(lambda self: self.prefilling)
    @rule(which=st.integers(0, 10**6), cached=st.floats(0, 1))
    def first_token(self, which: int, cached: float) -> None:
        request_id = self.prefilling.pop(which % len(self.prefilling))
        self.answering.append(request_id)
        uncached = max(1, round(self.prompts[request_id] * (1 - cached)))
        self.do(self.admission.first_token(request_id, uncached, self.now_s))
        assert self.admission.first_token(request_id, uncached, self.now_s) == []

    @precondition(lambda self: self.answering)
    @rule(which=st.integers(0, 10**6), tokens=st.integers(0, 500))
    def finish(self, which: int, tokens: int) -> None:
        request_id = self.answering.pop(which % len(self.answering))
        self.admission.answered(request_id, tokens // 2, self.now_s)
        self.do(self.admission.finished(request_id, tokens - tokens // 2, self.now_s))
        assert request_id not in self.admission

    @precondition(lambda self: self.waiting or self.prefilling or self.answering)
    @rule(which=st.integers(0, 10**6))
    def cancel(self, which: int) -> None:
        everyone = [*self.waiting, *self.prefilling, *self.answering, *self.later]
        request_id = everyone[which % len(everyone)]
        self.waiting.pop(request_id, None)
        self.later.pop(request_id, None)
        for group in (self.prefilling, self.answering):
            if request_id in group:
                group.remove(request_id)
        self.do(self.admission.cancelled(request_id, self.now_s))
        assert request_id not in self.admission and not self.admission.explain(request_id, self.now_s)

    @rule(seconds=st.sampled_from([0.001, 0.1, 1.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.ticked_s = self.now_s
        self.do(self.admission.tick(self.now_s))

    @rule(lanes=st.integers(1, 4), slots=st.sampled_from([None, 2, 8]))
    def resize(self, lanes: int, slots: int | None) -> None:
        self.do(self.admission.tick(self.now_s, Capacity(lanes, slots)))

    @invariant()
    def holds(self) -> None:
        self.admission.check(self.now_s)
        assert self.admission.num_waiting == len(self.waiting)
        late = [i for i, arrived_s in self.waiting.items() if arrived_s + MAX_WAIT_S <= self.ticked_s]
        assert not late, "a wait without a bound"

    def teardown(self) -> None:
        if not hasattr(self, "admission"):
            return
        while self.prefilling or self.answering:
            while self.prefilling:
                self.first_token(0, 0.5)
            self.finish(0, 1)
            self.admission.check(self.now_s)
        assert not self.waiting and not self.later and self.admission.idle, "someone was forgotten"


def _refuses(decisions: list[Decision], came: Arrival) -> bool:
    return any(isinstance(decision, Refuse) and decision.id == came.id for decision in decisions)


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestDoor = AdmissionMachine.TestCase
