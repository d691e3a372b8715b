"""Cost of a layer's operators except attention scores, for prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from tripool.planner.cost.setup import Placed, Routing, Setup, place_experts
from tripool.planner.cost.skew import deviations, hottest
from tripool.planner.hardware.describe import WEIGHT_BYTES, Hardware
from tripool.planner.models import ModelShape


def gemm_s(hardware: Hardware, params: float, rows: float, precision: str, *, lost_rows: float = 0.0) -> float:
    """`rows` of activations through `params` weights that are read once. `lost_rows`: to tiles and pipeline."""
    read_s = params * WEIGHT_BYTES[precision] / (hardware.hbm_bytes_per_s * hardware.memory_share)
    return max(read_s, 2.0 * params * (rows + lost_rows) / (hardware.flops[precision] * hardware.gemm_share))


def memory_s(hardware: Hardware, num_bytes: float) -> float:
    return num_bytes / (hardware.hbm_bytes_per_s * hardware.memory_share)


def attention_s(hardware: Hardware, flops: float, num_bytes: float) -> float:
    """Scores and values in BF16; compute-bound with many heads per cached byte, else bound by reading the cache."""
    compute_s = flops / (hardware.flops["bf16"] * hardware.attention_compute_share)
    return max(compute_s, num_bytes / (hardware.hbm_bytes_per_s * hardware.attention_memory_share))


@dataclass(frozen=True, slots=True)
class ExpertWork:
    seconds: float
    hot: float
    hot_tokens: float
    """Token copies that the busiest rank computes."""


@dataclass(frozen=True)
class LayerModel:
    hardware: Hardware
    model: ModelShape
    setup: Setup
    routing: Routing

    @property
    def placed(self) -> Placed | None:
        setup = self.setup
        if self.model.moe is None:
            return None
        return place_experts(self.model, setup.ep, self.routing.redundant_share, setup.balance)

    def projections_s(self, tokens: float) -> float:
        """Attention projections; a tensor-parallel group shares weights and tokens."""
        tp = self.setup.tp
        return gemm_s(self.hardware, self.model.attention_params / tp, tokens * tp, self.setup.precision)

    def dense_s(self, tokens: float) -> float:
        tp = self.setup.tp
        return gemm_s(self.hardware, self.model.dense_params / tp, tokens * tp, self.setup.precision)

    def passes_s(self, tokens: float) -> float:
        """Operators that only read and write activations."""
        return memory_s(self.hardware, tokens * self.model.hidden * 2 * self.routing.activation_passes)

    def head_s(self, rows: float) -> float:
        """Output head in BF16, split like attention."""
        tp = self.setup.tp
        return gemm_s(self.hardware, self.model.head_params / tp, rows * tp, "bf16")

    def shared_s(self, tokens: float) -> float:
        placed = self.placed
        if placed is None or placed.shared_ranks or not self.model.shared_params:
            return 0.0
        return gemm_s(self.hardware, self.model.shared_params, tokens, self.setup.precision)

    def jitter_s(self, compute_s: float) -> float:
        """Extra time of the slowest rank over the mean, for equal work."""
        return compute_s * self.routing.jitter * deviations(self.setup.ep)

    def experts(self, tokens: float, drift: float) -> ExpertWork:
        """Routed experts on the busiest rank, if every rank sends `tokens`."""
        moe, placed, setup = self.model.moe, self.placed, self.setup
        assert moe is not None and placed is not None
        mean = tokens * moe.top_k * setup.ep / placed.routed_ranks
        hot = hottest(
            moe.experts, placed.slots, placed.routed_ranks, mean,
            popularity=self.routing.popularity, drift=drift, balance=setup.balance,
        )  # fmt: skip
        hot_tokens = mean * hot
        # With few tokens, some experts are not read.
        active = placed.per_rank * (1.0 - exp(-hot_tokens / placed.per_rank))
        seconds = gemm_s(
            self.hardware, self.model.expert_params * active, hot_tokens / max(active, 1e-9), setup.precision,
            lost_rows=self.hardware.gemm_rows,
        )  # fmt: skip
        if placed.shared_ranks:
            shared_tokens = tokens * setup.ep / placed.shared_ranks
            seconds = max(seconds, gemm_s(self.hardware, self.model.shared_params, shared_tokens, setup.precision))
            hot_tokens = max(hot_tokens, shared_tokens)
        return ExpertWork(seconds, hot, hot_tokens)


def overlapped(compute_s: float, fixed_s: float, bytes_s: float, exposed: float, microbatches: int) -> float:
    """One microbatch: compute and exchange in sequence. Two: the longer hides the shorter, but moving bytes takes cores
    and memory bandwidth from compute.
    """
    exchange_s = fixed_s + bytes_s
    if microbatches == 1:
        return compute_s + exchange_s
    return max(compute_s, exchange_s) + exposed * min(compute_s, bytes_s)
