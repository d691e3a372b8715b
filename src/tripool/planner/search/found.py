"""What a search answers. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.planner.cost import Setup, Step


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
    step: Step


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
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What would lift the limit, and by how much."""

    name: str
    gain: float
    """Of requests per second; 0.1 is a tenth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    prefill: PrefillPool
    decode: DecodePool
    prefill_instances: int
    decode_instances: int
    """Of one shared pool both numbers count the same instances."""
    shared: bool
    """One pool does both, in turn."""
    spare_chips: int
    requests_per_s: float
    bound: str
    """prefill, decode or transfer."""
    transfer_share: float
    """Of the transfer plane's rate, used."""
    tpot_s: float
    ttft_s: float
    cost_per_million: float
    """Of output tokens."""
    watts: float
    cache_bytes: float
    """Of the pool, to keep finished contexts as long as asked."""
    levers: tuple[Lever, ...] = ()

    @property
    def chips(self) -> int:
        prefill = 0 if self.shared else self.prefill_instances * self.prefill.chips
        return prefill + self.decode_instances * self.decode.chips


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of the decode pool's front: nobody is faster for a user and carries more per chip."""

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
