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
    """The second token's wait for its KV included."""
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
    read_share: float = 1.0
    """Share of the hits that are read from the cache pool; the rest is computed, because reading takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change that would raise throughput, and by how much."""

    name: str
    gain: float
    """Relative gain of requests per second; 0.1 is a tenth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Instances that serve requests together: a prefill and a decode pool, or one shared pool."""

    prefill: PrefillPool
    decode: DecodePool
    prefill_instances: int
    decode_instances: int
    """For one shared pool, both numbers count the same instances."""
    shared: bool
    """One pool alternates between prefill and decode."""
    requests_per_s: float
    bound: str
    """prefill, decode or transfer."""
    transfer_share: float
    """Used share of the transfer plane's rate."""
    tpot_s: float
    ttft_s: float

    @property
    def chips(self) -> int:
        prefill = 0 if self.shared else self.prefill_instances * self.prefill.chips
        return prefill + self.decode_instances * self.decode.chips


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One cell, or several side by side where instances of one size do not fill the chips well."""

    cells: tuple[Cell, ...]
    """The one with the highest rate first."""
    spare_chips: int
    cost_per_million: float | None
    """Per million output tokens, of the chips that are used. None: no price is known."""
    kwh_per_million: float | None
    """Likewise energy. None: the hardware's description has no power."""
    watts: float | None
    cache_bytes: float
    """Size of the cache pool that keeps finished contexts for `keep_s`."""
    levers: tuple[Lever, ...] = ()

    @property
    def chips(self) -> int:
        return sum(cell.chips for cell in self.cells)

    @property
    def requests_per_s(self) -> float:
        return sum(cell.requests_per_s for cell in self.cells)

    @property
    def tpot_s(self) -> float:
        return max(cell.tpot_s for cell in self.cells)

    @property
    def ttft_s(self) -> float:
        return max(cell.ttft_s for cell in self.cells)

    @property
    def main(self) -> Cell:
        return self.cells[0]

    @property
    def is_parted(self) -> bool:
        """Attention and experts of decode on ranks of their own."""
        return any(cell.decode.setup.expert_ranks for cell in self.cells)

    @property
    def is_split(self) -> bool:
        """One prefill pool and one decode pool: what a deployment file and the simulator can hold."""
        return len(self.cells) == 1 and not self.main.shared


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
    is_mixed: bool = False
    """Prefill and decode on two kinds of hardware."""

    @property
    def best_split(self) -> Deployment | None:
        """The best of one prefill and one decode pool."""
        return next((found for found in self.deployments if found.is_split), None)

    @property
    def best_shared(self) -> Deployment | None:
        """The best of one shared pool."""
        alone = (found for found in self.deployments if len(found.cells) == 1)
        return next((found for found in alone if found.main.shared), None)

    @property
    def best_parted(self) -> Deployment | None:
        """The best with experts on ranks of their own."""
        return next((found for found in self.deployments if found.is_parted), None)
