"""Outcomes of all requests, one number per column: a million of them fit into a few tens of megabytes. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tripool.errors import TripoolError

DONE, REFUSED, FAILED = range(3)
OUTCOMES = ("done", "refused", "failed")


@dataclass(slots=True, eq=False)
class Open:
    """A request that is under way."""

    arrived_s: float
    input_tokens: int
    output_tokens: int
    tenant: str
    keys: Sequence[bytes]
    first_s: float | None = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Of those: from the pool, not from the prefill instance's own memory."""


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

    def close(self, request: Open, outcome: int, now_s: float, error: TripoolError | None = None) -> None:
        self.outcome.append(outcome)
        self.arrived_s.append(request.arrived_s)
        self.first_s.append(now_s if request.first_s is None else request.first_s)
        self.last_s.append(now_s)
        self.input_tokens.append(request.input_tokens)
        self.output_tokens.append(request.output_tokens)
        self.local_tokens.append(request.cached_tokens - request.fetched_tokens)
        self.fetched_tokens.append(request.fetched_tokens)
        self.tenant.append(self.tenants.setdefault(request.tenant, len(self.tenants)))
        if error is not None:
            self.errors[outcome, error.code] += 1
            self.examples.setdefault((outcome, error.code), error.message)
