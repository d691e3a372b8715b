"""Requests as they come, while they are under way, and their outcomes. Pure.

Outcomes are one number per column: a million of them fit into a few tens of megabytes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tripool.core import Request, TokenEvent
from tripool.errors import TripoolError
from tripool.router.held import Held, HeldChoice
from tripool.tenants import ANONYMOUS, Tenant

DONE, REFUSED, FAILED = range(3)
OUTCOMES = ("done", "refused", "failed")


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float
    request: Request
    tenant: Tenant = ANONYMOUS
    cancel_s: float | None = None
    """After its arrival."""
    keys: Sequence[bytes] = ()
    """Of the prompt's full blocks, where its tokens do not tell them."""


@dataclass(slots=True, eq=False)
class Open:
    """A request that is under way."""

    arrival: Arrival
    arrived_s: float
    choices: int = 1
    """That have not ended."""
    admitted: bool = False
    first_s: float | None = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Of those: from the pool, not from the prefill instance's own memory."""
    events: dict[int, list[TokenEvent]] = field(default_factory=dict)
    """By choice, where a gateway is to take the request to another coordinator."""

    @property
    def held(self) -> Held:
        """What its client has."""

        def had(events: list[TokenEvent]) -> HeldChoice:
            if not events:
                return HeldChoice(())
            last, tokens = events[-1], tuple(event.token_id for event in events)
            drafts = (last.num_draft_tokens, last.num_accepted_draft_tokens)
            return HeldChoice(tokens, last.finish_reason, *drafts)

        choices = [had(self.events.get(index, [])) for index in range(self.arrival.request.params.n)]
        return Held(tuple(choices), None if self.first_s is None else self.cached_tokens)


class RequestTable:
    def __init__(self) -> None:
        self.outcome = array("b")
        self.arrived_s, self.first_s, self.last_s = array("d"), array("d"), array("d")
        """Of those without a first token, that of their end."""
        self.input_tokens, self.output_tokens = array("l"), array("l")
        self.local_tokens, self.fetched_tokens = array("l"), array("l")
        self.tenant = array("l")
        self.tenants: dict[str, int] = {}
        self.errors: Counter[tuple[int, str]] = Counter()
        """By outcome and code."""
        self.examples: dict[tuple[int, str], str] = {}
        """The first error's message of each."""

    def __len__(self) -> int:
        return len(self.outcome)

    @property
    def done(self) -> list[int]:
        return [number for number, outcome in enumerate(self.outcome) if outcome == DONE]

    def close(self, opened: Open, outcome: int, now_s: float, error: TripoolError | None = None) -> None:
        request = opened.arrival.request
        self.outcome.append(outcome)
        self.arrived_s.append(opened.arrived_s)
        self.first_s.append(now_s if opened.first_s is None else opened.first_s)
        self.last_s.append(now_s)
        self.input_tokens.append(len(request.prompt_ids))
        self.output_tokens.append(request.params.max_tokens or 0)
        self.local_tokens.append(opened.cached_tokens - opened.fetched_tokens)
        self.fetched_tokens.append(opened.fetched_tokens)
        self.tenant.append(self.tenants.setdefault(request.slo.tenant, len(self.tenants)))
        if error is not None:
            self.errors[outcome, error.code] += 1
            self.examples.setdefault((outcome, error.code), error.message)
