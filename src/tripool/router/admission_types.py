"""The nouns of the door: who comes, what room there is, what is decided. Pure data."""

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
    """That it may have, all choices together: its tenant's rate must have room for them too."""
    usual_tokens: int | None = None
    """That it probably has, where that is less: what it is compared with others by."""
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
    """How much a backend works on at a time."""

    lanes: int = 1
    """Workers that compute prompts."""
    slots: int | None = None
    """Choices that can be answered at the same time. None: not known, and not minded."""


@dataclass(frozen=True, slots=True)
class Admit:
    id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of it was begun."""

    id: str
    error: TripoolError


Decision = Admit | Refuse


class Stage(Enum):
    WAITING = "waiting"
    INSIDE = "inside"
    """Let through, no token yet."""
    ANSWERING = "answering"


@dataclass(slots=True, eq=False)
class PendingRequest:
    arrival: Arrival
    account: Account
    cost: float
    """Tokens that it was charged: what will probably have to be computed."""
    reserved_tokens: float
    """Of its answers, taken from its tenant's rate and not come yet."""
    rest: deque[Arrival]
    """Further prompts of the same request, each of which arrives when the one before it is let through."""
    arrived_s: float
    ahead_tokens: float
    """That were to go before it when it came."""
    predicted_s: float | None
    stage: Stage = Stage.WAITING
    why: str = ""
    """What it had to wait for when it came."""
    admitted_s: float = 0.0
    unhindered: bool = False
    """There was a free lane when it was let through."""


def check_account(account: Account, pending_requests: Sequence[PendingRequest]) -> None:
    """The invariants of one tenant. `pending_requests`: all of its own."""
    held = [pending for pending in pending_requests if pending.stage is not Stage.WAITING]
    assert account.slots_held == sum(pending.arrival.choices for pending in held) and account.num_inside == len(held)
    assert account.num_unbegun == sum(pending.stage is Stage.INSIDE for pending in held)
    asked = [one for pending in pending_requests for one in (pending.arrival, *pending.rest)]
    assert account.open_tokens == sum(one.asked_tokens for one in asked), "what is asked for is miscounted"
