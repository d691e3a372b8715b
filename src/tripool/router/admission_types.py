"""Types of admission control: arrivals, capacity, decisions, pending requests. Pure data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tripool.core import Slo
from tripool.errors import TripoolError
from tripool.router.fair_queue import Account
from tripool.tenants import ANONYMOUS, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    id: str
    prompt_tokens: int
    answer_tokens: int = 0
    """Most tokens that all its choices together may generate: its tenant's rate must have room for them."""
    usual_tokens: int | None = None
    """Tokens that they probably generate, where that is less: used to compare tenants."""
    tenant: Tenant = ANONYMOUS
    choices: int = 1
    slo: Slo = field(default_factory=Slo)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def asked_tokens(self) -> int:
        return self.prompt_tokens + (self.answer_tokens if self.usual_tokens is None else self.usual_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a backend can compute at a time."""

    lanes: int = 1
    """Prefill workers."""
    slots: int | None = None
    """Choices that can decode at the same time. None: unknown, and not limited."""


@dataclass(frozen=True, slots=True)
class Admit:
    id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """No work on it was begun."""

    id: str
    error: TripoolError


Decision = Admit | Refuse


class Stage(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    """Admitted, no token yet."""
    ANSWERING = "answering"


@dataclass(slots=True, eq=False)
class PendingRequest:
    arrival: Arrival
    account: Account
    cost: float
    """Tokens charged to its tenant: those that will probably have to be computed."""
    reserved_tokens: float
    """Tokens of its answers that are charged to its tenant's rate and not generated yet."""
    rest: deque[Arrival]
    """Further prompts of the same request; each arrives when the one before it is admitted."""
    arrived_s: float
    ahead_tokens: float
    """Tokens queued before it at its arrival."""
    predicted_s: float | None
    stage: Stage = Stage.WAITING
    why: str = ""
    """What it had to wait for at its arrival."""
    admitted_s: float = 0.0
    settled: bool = False
    """An earlier coordinator admitted it, and has charged its prompt for good: it is neither charged nor refunded."""
    unhindered: bool = False
    """A prefill worker was free when it was admitted."""

    def explain(self, now_s: float) -> dict[str, str | int | float | bool | None]:
        until_s = now_s if self.stage is Stage.WAITING else self.admitted_s
        waited = f"{(until_s - self.arrived_s) * 1e3:.1f} ms"
        facts: dict[str, str | int | float | bool | None] = {
            "waited for admission": f"{waited}, because {self.why}" if self.why else waited,
            "predicted first token ms": None if self.predicted_s is None else round(self.predicted_s * 1e3, 1),
            "priority": self.arrival.slo.priority,
        }
        if self.arrival.tenant.name:
            facts["tenant"] = self.arrival.tenant.name
        if self.arrival.slo.ttft_ms is not None:
            facts["ttft SLO ms"] = self.arrival.slo.ttft_ms
        return facts


def check_account(account: Account, pending_requests: Sequence[PendingRequest]) -> None:
    """Invariants of one tenant. `pending_requests`: all of its own."""
    held = [pending for pending in pending_requests if pending.stage is not Stage.WAITING]
    assert account.slots_held == sum(pending.arrival.choices for pending in held) and account.num_admitted == len(held)
    assert account.num_prefilling == sum(pending.stage is Stage.PREFILLING for pending in held)
    asked = [one for pending in pending_requests for one in (pending.arrival, *pending.rest)]
    assert account.open_tokens == sum(one.asked_tokens for one in asked), "asked tokens are miscounted"
