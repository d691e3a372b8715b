"""Input of the cost model (parallelism and options of one instance), its memory footprint, and its output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil
from typing import Literal

from tripool.planner.facts import Facts
from tripool.planner.hardware import INT4, WEIGHT_BYTES, Hardware
from tripool.planner.models import ModelShape

Balance = Literal["none", "balanced", "perfect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Imbalance of expert choices; independent of the hardware."""

    popularity: float
    decode_drift: float
    prefill_drift: float
    redundant_share: float
    activation_passes: float
    jitter: float
    """Relative spread of a rank's compute time between two exchanges: clocks, refresh, launches."""
    step_spread: float
    """Spread (log-normal sigma) of how often experts are chosen in one step; some get nothing and are not read."""


@lru_cache(maxsize=1)
def named_routing() -> Routing:
    facts = Facts(files("tripool.planner.models").joinpath("routing.toml").read_text("utf-8"), "routing.toml")
    return Routing(**facts.table("routing"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One instance. `ep` is its number of ranks; a model without experts has `ep == tp`."""

    ep: int
    precision: str
    tp: int = 1
    """Ranks that share one copy of attention and its requests."""
    microbatches: int = 1
    drafts: int = 0
    """Tokens drafted per step, one after the other, by the MTP layer."""
    accept: float = 0.0
    """Share of drafts accepted, over all of them."""
    balance: Balance = "balanced"
    kv_element_bytes: float = 2.0
    attention_8bit: bool = False
    """Attention computes in 8 bits over an 8-bit cache."""
    split_experts: bool = False
    """Every rank holds a part of each expert (tensor parallelism) instead of some experts; `tp == ep`."""
    rest: str | None = None
    """Precision of all but the experts, where a deployment says; None: as published checkpoints have it."""
    expert_ranks: int = 0
    """Of `ep`: ranks that hold only experts, the others only attention. 0: every rank holds both."""

    def __post_init__(self) -> None:
        assert self.ep >= 1 and self.tp >= 1 and self.ep % self.tp == 0, "tensor-parallel groups must divide the ranks"
        assert self.microbatches in (1, 2) and self.drafts >= 0 and 0.0 <= self.accept <= 1.0
        assert not self.split_experts or self.tp == self.ep, "experts are split over the tensor-parallel group"
        assert 0 <= self.expert_ranks < self.ep and not (self.expert_ranks and (self.tp > 1 or self.microbatches == 1))

    @property
    def attention_ranks(self) -> int:
        """Ranks with requests."""
        return self.ep - self.expert_ranks

    @property
    def holding_ranks(self) -> int:
        """Ranks over which experts are spread."""
        return self.expert_ranks or self.ep

    @property
    def exchanging_ranks(self) -> int:
        """Ranks that send tokens to experts of each other. In one tensor-parallel group every rank has all tokens: it
        computes its own experts, or its part of each, and the results are reduced.
        """
        return 1 if self.reduces_experts else self.ep

    @property
    def reduces_experts(self) -> bool:
        return self.tp == self.ep and self.tp > 1

    @property
    def query_tokens(self) -> int:
        """Per request and step."""
        return 1 + self.drafts

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated per request and step."""
        return 1.0 + self.drafts * self.accept


def dense_precision(model: ModelShape, setup: Setup) -> str:
    """Of all but the routed experts: checkpoints with 4-bit experts keep some of the rest in more bits."""
    if setup.rest is not None or setup.precision not in ("fp4", INT4):
        return setup.rest or setup.precision
    if model.moe is None:
        return setup.precision
    return model.beside_fp4 if setup.precision == "fp4" else "bf16"


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement of routed and shared experts."""

    slots: int
    """Slots for routed experts over all ranks, replicas included."""
    routed_ranks: int
    shared_ranks: int
    """Ranks with only a shared expert; 0: every rank has its own copy."""

    @property
    def per_rank(self) -> int:
        return self.slots // self.routed_ranks


@lru_cache(maxsize=512)
def place_experts(model: ModelShape, ep: int, redundant_share: float, balance: Balance) -> Placed:
    """As published: EP32 holds 8 + 1 redundant, EP320 one each: 256 + 32 redundant + 32 copies of the shared expert."""
    assert model.moe is not None
    experts = model.moe.experts
    redundant = 0 if balance == "none" else ceil(redundant_share * experts)
    spare = ep - experts
    if model.moe.shared_width and redundant and spare >= 2 * redundant:
        return Placed(experts + spare // 2 + spare % 2, ep - spare // 2, spare // 2)
    per_rank = max(1, ceil((experts + redundant) / ep))
    return Placed(per_rank * ep, ep, 0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of one instance, in seconds. `parts` is the time of each operator by itself, over all layers."""

    seconds: float
    compute_s: float
    exchange_s: float
    hidden_s: float
    """Overlapped time of compute and exchange."""
    hot: float
    """Load of the busiest rank over the mean."""
    parts: tuple[tuple[str, float], ...]

    @property
    def bound(self) -> str:
        """The slowest operator."""
        return max(self.parts, key=lambda part: part[1])[0]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Per rank, in bytes."""

    weights: float
    buffers: float
    available: float
    kv_per_token: float

    state: float = 0.0
    """Per request, whatever its length."""

    @property
    def kv(self) -> float:
        """Bytes left for KV; negative if the weights do not fit."""
        return self.available - self.weights - self.buffers

    def max_requests(self, tokens_each: float) -> float:
        """Requests per rank whose KV fits."""
        return max(0.0, self.kv) / (self.kv_per_token * tokens_each + self.state)


def footprint(hardware: Hardware, model: ModelShape, setup: Setup, routing: Routing | None = None) -> Footprint:
    """Of a rank with requests; where experts have ranks of their own, of the fuller kind of rank."""
    routing = routing or named_routing()
    weight, dense = WEIGHT_BYTES[setup.precision], WEIGHT_BYTES[dense_precision(model, setup)]
    drafting = 1 if setup.drafts else 0  # one MTP layer makes all drafts
    replicated = (model.layers + drafting) * model.attention_params + model.dense_layers * model.dense_params
    head_bytes = 2.0 * model.head_params * (1 if model.tied_head else 2)
    experts = 0.0
    if model.moe is not None:
        moe_layers = model.moe_layers + drafting
        if setup.split_experts:
            held = model.moe.experts * model.expert_params / setup.ep
            replicated += moe_layers * model.shared_params
        else:
            placed = place_experts(model, setup.holding_ranks, routing.redundant_share, setup.balance)
            held = placed.per_rank * model.expert_params
            experts = 0.0 if placed.shared_ranks else moe_layers * model.shared_params * dense
        experts += moe_layers * held * weight
    attention = (replicated * dense + head_bytes) / setup.tp
    split = model.attention.kv_split(setup.tp)
    drafted = drafting * model.attention.kv_width * setup.kv_element_bytes
    kv_per_token = (model.kv_bytes_per_token(setup.kv_element_bytes) + drafted) * setup.tp / split
    # A tensor-parallel group holds `tp` times a rank's requests, split as far as the cache splits.
    state = model.state_bytes(setup.kv_element_bytes) * setup.tp / split
    available = hardware.hbm_bytes * hardware.hbm_usable
    weights = attention + experts
    if setup.expert_ranks:
        weights = available if experts + hardware.buffers_bytes > available else attention
    return Footprint(weights, hardware.buffers_bytes, available, kv_per_token, state)
