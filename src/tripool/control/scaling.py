"""Facts for the autoscaler and what it decides: workers, loads, actions and records. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Pool = Literal["prefill", "decode", "cache"]
POOLS: tuple[Pool, ...] = ("prefill", "decode", "cache")
Stage = Literal["starting", "ready", "leaving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker, or one instance of several ranks, as it is now."""

    name: str
    pool: Pool
    """Where it works, or will: a worker that converts is "starting" in its next pool."""
    stage: Stage
    since_s: float
    """When this stage began."""
    converts: bool = True
    """Whether it can change between prefill and decode and keep its weights."""
    converting: bool = False
    """A "starting" worker that only changes its pool: it comes within seconds."""
    contexts: int = 0
    """Of a decode worker: sequences placed there."""
    ceiling: int | None = None
    """Of a decode worker: sequences that it can run within their TPOT objectives, as its SLO controller learned; None:
    unknown, or no objective binds."""
    slots: int = 1
    """Of a decode worker: sequences that it runs at most, whatever the objectives."""
    memory: float = 0.0
    """Of a decode worker: share of its KV memory that sequences hold. Of a cache member: share of its blocks in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What happened since the last report, and what waits now."""

    now_s: float
    prompt_tokens: Sequence[float] = ()
    """Uncached tokens of the prompts that arrived, second by second."""
    waiting_contexts: int = 0
    """Sequences with a first token that no decode worker runs yet."""
    prompt_cost_s: tuple[float, float] | None = None
    """Seconds of a prefill worker per step and per uncached token, as measured. None: not known yet."""
    first_tokens: int = 0
    late_first_tokens: int = 0
    """Of those: later than the TTFT objective; refused requests count as late."""
    answers: int = 0
    late_answers: int = 0
    """Of the answers that ended: slower than their TPOT objective."""
    lost_hit_tokens: float = 0.0
    """Tokens that were computed again because their blocks had been evicted from the cache pool."""


@dataclass(frozen=True, slots=True)
class Convert:
    worker: str
    to: Pool


@dataclass(frozen=True, slots=True)
class Start:
    pool: Pool


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain it, then end it. A worker that is still starting just ends."""

    worker: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A start that did not come by its deadline."""

    worker: str


Action = Convert | Start | Stop | GiveUp


@dataclass(frozen=True, slots=True)
class Alternative:
    """What else was considered, and why it was not chosen."""

    what: str
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change, with its reasons."""

    at_s: float
    bound: str
    """What required it, in words with numbers."""
    actions: tuple[Action, ...]
    before: Mapping[Pool, int]
    after: Mapping[Pool, int]
    """Workers wanted per pool."""
    demand: Mapping[Pool, float]
    """Measured and smoothed, in workers: neither forecast nor what it varies by."""
    considered: tuple[Alternative, ...] = field(default=())


def flaps(decisions: Sequence[Decision], cooldown_s: float, dead_band: float) -> list[tuple[Pool, float]]:
    """Changes of a pool's size that were reversed within the cool-down although its demand did not change by more than
    the dead band: (pool, when)."""
    found: list[tuple[Pool, float]] = []
    last: dict[Pool, tuple[float, bool, float]] = {}
    for decision in decisions:
        for pool in POOLS:
            change, demand = decision.after[pool] - decision.before[pool], decision.demand[pool]
            if not change:
                continue
            if pool in last:
                at_s, grew, before = last[pool]
                moved = demand - before if change > 0 else before - demand
                soon = decision.at_s - at_s < cooldown_s
                if grew != (change > 0) and soon and moved <= dead_band * max(before, demand):
                    found.append((pool, decision.at_s))
            last[pool] = decision.at_s, change > 0, demand
    return found
