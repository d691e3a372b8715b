"""Results of a search. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.planner.cost import Setup, StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    setup: Setup
    batch: int
    """Requests per rank."""
    tpot_s: float
    tokens_per_s_per_chip: float
    chips: int
    """Of one instance."""
    stopped_by: str
    """Why the batch is not larger: tpot, memory, or neither."""
    step: StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPool:
    setup: Setup
    tokens: int
    """New tokens per rank and batch."""
    batch_s: float
    ttft_s: float
    tokens_per_s_per_chip: float
    """Prompt tokens, cached ones included."""
    chips: int
    stopped_by: str
    step: StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change that would raise throughput, and by how much."""

    name: str
    gain: float
    """Relative gain of requests per second; 0.1 is a tenth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    prefill: PrefillPool
    decode: DecodePool
    prefill_instances: int
    decode_instances: int
    """For one shared pool, both numbers count the same instances."""
    shared: bool
    """One pool alternates between prefill and decode."""
    spare_chips: int
    requests_per_s: float
    bound: str
    """prefill, decode or transfer."""
    transfer_share: float
    """Used share of the transfer plane's rate."""
    tpot_s: float
    ttft_s: float
    cost_per_million: float
    """Per million output tokens."""
    watts: float
    cache_bytes: float
    """Size of the cache pool that keeps finished contexts for `keep_s`."""
    levers: tuple[Lever, ...] = ()

    @property
    def chips(self) -> int:
        prefill = 0 if self.shared else self.prefill_instances * self.prefill.chips
        return prefill + self.decode_instances * self.decode.chips


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the decode pool's Pareto front of speed per user and throughput per chip."""

    tokens_per_s_per_user: float
    tokens_per_s_per_chip: float
    setup: Setup
    batch: int
    chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    deployments: tuple[Deployment, ...]
    """The best first."""
    front: tuple[Point, ...]
    num_considered: int
