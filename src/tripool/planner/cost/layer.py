"""Cost of one layer and of a step of layers, for prefill and decode; attention scores are an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp

from tripool.planner.cost.exchange import Exchanged, reduce_s
from tripool.planner.cost.setup import Placed, Routing, Setup, StepCost, dense_precision, place_experts
from tripool.planner.cost.skew import deviations, hottest, share_chosen
from tripool.planner.hardware import INT4, WEIGHT_BYTES, Hardware
from tripool.planner.models import ModelShape
from tripool.planner.models.shape import Gqa

_DENSE_KERNELS = 11
"""Of a layer without experts: four GEMMs, rotary, norm, activation, and attention, which takes as long as four."""
_ATTENTION_KERNELS = 9
"""Of attention that is not latent: two norms, which some models lack, two GEMMs, rotary, attention itself, as above."""
_LINEAR_KERNELS = 8
"""Two norms, three GEMMs, convolution, gates, state."""
_INDEX_KERNELS = 9
"""Three GEMMs, norm, rotary, transform, quantisation, scores, choice."""
_SHARED_KERNELS = 3
"""Of a shared expert: two GEMMs and the activation."""
_LAUNCHES = {"latent": 14, "attention": 8, "linear": 40, "index": 9, "experts": 12, "8 bits": 2, "shared": 4}
"""Kernels of a prefill layer that the host launches one by one: with each kind of attention, norms and reductions, and
routing, counted; quantisation of activations apart. Twelve of linear attention's are Triton's, started from Python,
which takes as long as three others.
"""
_LAUNCHES_OF_LAYER = 32
"""Of latent attention, 8-bit experts and a shared one, for which descriptions have `host_s`."""


def gemm_s(hardware: Hardware, params: float, rows: float, precision: str) -> float:
    """`rows` of activations through `params` weights that are read once."""
    read_s = memory_s(hardware, params * WEIGHT_BYTES[precision])
    return max(read_s, 2.0 * params * rows / (hardware.flops[precision] * hardware.gemm_shares[precision]))


def grouped_gemm_s(hardware: Hardware, params: float, rows: float, precision: str) -> float:
    """Experts of `params` weights together, `rows` each: tiles and pipelines cost rows that were not sent."""
    read_s = params * WEIGHT_BYTES[precision] / (hardware.hbm_bytes_per_s * hardware.grouped_memory_shares[precision])
    padded = max(hardware.gemm_tile, rows + hardware.gemm_rows)
    return max(read_s, 2.0 * params * padded / (hardware.flops[precision] * hardware.grouped_shares[precision]))


def split_gemm_s(hardware: Hardware, params: float, rows: float, precision: str) -> float:
    """Experts of one tensor-parallel group, a part of each on every rank or some of them: with kernels of their own."""
    read_s = params * WEIGHT_BYTES[precision] / (hardware.hbm_bytes_per_s * hardware.grouped_memory_shares[precision])
    rate = hardware.flops[precision] * hardware.split_shares[precision]
    return max(read_s, 2.0 * params * max(hardware.split_tile, rows + hardware.split_rows) / rate)


def memory_s(hardware: Hardware, num_bytes: float) -> float:
    return num_bytes / (hardware.hbm_bytes_per_s * hardware.memory_share)


def attention_s(
    hardware: Hardware, flops: float, num_bytes: float, *, eight_bit: bool = False, sparse: bool = False,
    prefill: bool = False,
) -> float:  # fmt: skip
    """Scores and values; compute-bound with many heads per cached byte, else bound by reading the cache."""
    share = hardware.prefill_attention_share if prefill else hardware.attention_compute_share
    share8 = hardware.prefill_attention_8bit_share if prefill else hardware.attention_8bit_share
    rate = hardware.flops["bf16"] * share
    if sparse:
        rate = hardware.flops["bf16"] * hardware.attention_sparse_share
    elif eight_bit and share8:
        rate = hardware.flops[hardware.eight_bit] * share8
    return max(flops / rate, num_bytes / (hardware.hbm_bytes_per_s * hardware.attention_memory_share))


def index_s(hardware: Hardware, flops: float, num_bytes: float) -> float:
    """The indexer of sparse attention: 8-bit scores over the whole cache."""
    precision = hardware.eight_bit
    compute_s = flops / (hardware.flops[precision] * hardware.gemm_shares[precision])
    return max(compute_s, num_bytes / (hardware.hbm_bytes_per_s * hardware.attention_memory_share))


@dataclass(frozen=True, slots=True)
class ExpertWork:
    seconds: float
    hot: float
    hot_tokens: float
    """Token copies that the busiest rank computes."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    seconds: float
    hot: float
    """Load of the busiest rank over the mean."""
    parts: tuple[tuple[str, float], ...]
    """Time of each operator by itself."""


@dataclass(frozen=True)
class LayerModel:
    hardware: Hardware
    model: ModelShape
    setup: Setup
    routing: Routing

    @cached_property
    def placed(self) -> Placed | None:
        setup = self.setup
        if self.model.moe is None:
            return None
        return place_experts(self.model, setup.holding_ranks, self.routing.redundant_share, setup.balance)

    @cached_property
    def dense(self) -> str:
        return dense_precision(self.model, self.setup)

    @cached_property
    def fixed_s(self) -> float:
        """Of a layer with experts beside its operators' bytes and operations. Descriptions have it for latent
        attention, 8-bit experts and a shared one; other attention is fewer kernels, and the indexer of sparse
        attention more.
        """
        hardware, model = self.hardware, self.model
        kernel_s = hardware.dense_layer_s / _DENSE_KERNELS
        fixed_s = hardware.layer_s
        if isinstance(model.attention, Gqa) and hardware.latent_s:
            linear = model.linear_layers / model.layers
            full = _ATTENTION_KERNELS - (0 if model.attention.qk_norm else 2)
            kernels = (1.0 - linear) * full + linear * _LINEAR_KERNELS
            fixed_s += kernels * kernel_s - hardware.latent_s
        elif self.setup.tp > 1 and hardware.latent_split_s and not model.attention.index_topk:
            fixed_s += hardware.latent_split_s - hardware.latent_s
        if hardware.latent_s and not model.shared_params:
            fixed_s -= _SHARED_KERNELS * kernel_s
        if hardware.experts_s:
            fixed_s += self._experts_s - hardware.experts_s
        if model.attention.index_topk:
            fixed_s += hardware.index_s or _INDEX_KERNELS * kernel_s
        return fixed_s

    @property
    def _experts_s(self) -> float:
        """Of the experts' kernels beside their weights."""
        hardware, precision = self.hardware, self.setup.precision
        known = {
            "fp4": hardware.experts_fp4_s, "bf16": hardware.experts_bf16_s,
            INT4: hardware.experts_int4_s or hardware.experts_bf16_s,
        }.get(precision, 0.0)  # fmt: skip
        if not known and self.setup.split_experts:
            known = hardware.experts_split_s
        return known or hardware.experts_s

    @cached_property
    def launched_s(self) -> float:
        """Least time of a prefill layer, by the number of kernels that the host launches for it."""
        model = self.model
        linear = model.linear_layers / model.layers
        launches: float = _LAUNCHES["attention" if isinstance(model.attention, Gqa) else "latent"]
        launches += linear * (_LAUNCHES["linear"] - launches)
        launches += _LAUNCHES["index"] if model.attention.index_topk else 0
        launches += _LAUNCHES["experts"] if model.moe else 0
        launches += _LAUNCHES["shared"] if model.shared_params or model.moe is None else 0
        launches += _LAUNCHES["8 bits"] if self.dense != "bf16" else 0
        return self.hardware.host_s * launches / _LAUNCHES_OF_LAYER

    def passes_s(self, tokens: float) -> float:
        """Operators that only read and write activations."""
        return memory_s(self.hardware, tokens * self.model.hidden * 2 * self.routing.activation_passes)

    def head_s(self, rows: float) -> float:
        return self._split_s(self.model.head_params, rows, "bf16")

    def shared_s(self, tokens: float) -> float:
        placed = self.placed
        if placed is None or placed.shared_ranks or not self.model.shared_params:
            return 0.0
        if self.setup.split_experts:
            return self._split_s(self.model.shared_params, tokens)
        return gemm_s(self.hardware, self.model.shared_params, tokens, self.dense)

    def _split_s(self, params: float, tokens: float, precision: str | None = None) -> float:
        """Attention projections, dense FFN, head: a tensor-parallel group shares weights and tokens."""
        tp = self.setup.tp
        return gemm_s(self.hardware, params / tp, tokens * tp, precision or self.dense)

    def _reduce_s(self, tokens: float) -> float:
        return reduce_s(self.hardware, self.model, tp=self.setup.tp, tokens=tokens * self.setup.tp)

    def jitter_s(self, compute_s: float) -> float:
        """Extra time of the slowest rank over the mean, for equal work."""
        return compute_s * self.routing.jitter * deviations(self.setup.ep)

    def experts(self, tokens: float, drift: float) -> ExpertWork:
        """Routed experts on the busiest rank, if every rank with requests sends `tokens`."""
        moe, placed, setup = self.model.moe, self.placed, self.setup
        assert moe is not None and placed is not None
        if setup.split_experts:
            return self._split_experts(tokens * setup.tp * moe.top_k)
        mean = tokens * moe.top_k * setup.attention_ranks / placed.routed_ranks
        hot = hottest(
            moe.experts, placed.slots, placed.routed_ranks, mean,
            popularity=self.routing.popularity, drift=drift, balance=setup.balance,
        )  # fmt: skip
        hot_tokens = mean * hot
        # With few tokens, some experts are not read.
        active = placed.per_rank * (1.0 - exp(-hot_tokens / placed.per_rank))
        rows = hot_tokens / max(active, 1e-9)
        gemm = split_gemm_s if setup.reduces_experts else grouped_gemm_s  # the kernels of a server, or of an exchange
        seconds = gemm(self.hardware, self.model.expert_params * active, rows, setup.precision)
        if placed.shared_ranks:
            shared_tokens = tokens * setup.attention_ranks / placed.shared_ranks
            shared_s = gemm_s(self.hardware, self.model.shared_params, shared_tokens, self.dense)
            seconds = max(seconds, shared_s)
            hot_tokens = max(hot_tokens, shared_tokens)
        return ExpertWork(seconds, hot, hot_tokens)

    def _split_experts(self, copies: float) -> ExpertWork:
        """Each rank computes its part of every expert, for the token copies of the whole group."""
        moe, setup = self.model.moe, self.setup
        assert moe is not None
        active = moe.experts * share_chosen(copies, moe.experts, self.routing.step_spread)
        params = self.model.expert_params * active / setup.ep
        seconds = split_gemm_s(self.hardware, params, copies / max(active, 1e-9), setup.precision)
        return ExpertWork(seconds, 1.0, copies / setup.ep)

    def dense_layer(self, tokens: float, scores_s: float, *, stack: float = 1.0) -> LayerCost:
        """`stack`: time of the compute operators over the sum of their own times."""
        parts = (
            ("projections", stack * self._split_s(self.model.attention_params, tokens)),
            ("attention", stack * scores_s),
            ("dense FFN", stack * self._split_s(self.model.dense_params, tokens)),
            ("activations", stack * self.passes_s(tokens)),
            ("tensor parallel", 2 * self._reduce_s(tokens)),
            ("layer", self.hardware.dense_layer_s),
        )
        return LayerCost(sum(seconds for _, seconds in parts), 1.0, parts)

    def moe_layer(
        self, tokens: float, scores_s: float, exchange: Callable[[float, ExpertWork], Exchanged], *, drift: float,
        exposed: float, core_share: float = 0.0, stack: float = 1.0,
    ) -> LayerCost:  # fmt: skip
        """`exchange`: cost of one microbatch's tokens; `exposed`: share of it that two microbatches cannot hide;
        `core_share`: share of the cores that the exchange uses meanwhile.
        """
        count = self.setup.microbatches
        share = tokens / count
        work = self.experts(share, drift)
        moved = exchange(share, work)
        parts: tuple[tuple[str, float], ...] = (
            ("projections", stack * count * self._split_s(self.model.attention_params, share)),
            ("attention", stack * scores_s),
            ("experts", stack * count * work.seconds),
            ("shared expert", stack * count * self.shared_s(share)),
            ("activations", stack * count * self.passes_s(share)),
            ("tensor parallel", count * self._reduce_s(share) * (2 if self.setup.reduces_experts else 1)),
            ("layer", count * self.fixed_s),
        )
        if self.setup.expert_ranks:
            return self._two_pools(dict(parts), work, moved)
        worked_s = sum(seconds for _, seconds in parts)
        jitter_s = self.jitter_s(worked_s)
        compute_s = worked_s + jitter_s
        if count > 1:
            compute_s /= 1.0 - core_share
        seconds = overlapped(compute_s, count * moved.fixed_s, count * moved.bytes_s, exposed, count)
        exchanged = (("dispatch", count * moved.dispatch_s), ("combine", count * moved.combine_s))
        return LayerCost(seconds, work.hot, (*parts, ("jitter", jitter_s), *exchanged))

    def _two_pools(self, parts: dict[str, float], work: ExpertWork, moved: Exchanged) -> LayerCost:
        """Attention and experts on ranks of their own: while one microbatch is with the experts, the other is with
        attention; the slower pool sets the pace, and one exchange of each microbatch is not hidden.
        """
        count = self.setup.microbatches
        jitter_s = self.jitter_s(sum(parts.values()))
        experts_s = parts["experts"] + parts["shared expert"]
        attention_s = sum(parts.values()) - experts_s + jitter_s
        exchange_s = moved.dispatch_s + moved.combine_s
        exchanged = (("dispatch", count * moved.dispatch_s), ("combine", count * moved.combine_s))
        round_s = attention_s / count + experts_s / count + exchange_s  # of one microbatch, alone
        seconds = max(attention_s, experts_s, count * exchange_s, round_s)
        return LayerCost(seconds, work.hot, (*parts.items(), ("jitter", jitter_s), *exchanged))


def step_cost(layers: Sequence[tuple[int, LayerCost]], fixed: dict[str, float]) -> StepCost:
    """A step of so many layers of each kind, and of what a step does once."""
    parts = dict(fixed)
    for count, layer in layers:
        for name, seconds in layer.parts:
            parts[name] = parts.get(name, 0.0) + count * seconds
    total_s = sum(fixed.values()) + sum(count * layer.seconds for count, layer in layers)
    exchange_s = parts.get("dispatch", 0.0) + parts.get("combine", 0.0)
    worked_s = sum(parts.values())
    hidden_s = max(0.0, worked_s - total_s)
    return StepCost(total_s, worked_s - exchange_s, exchange_s, hidden_s, layers[0][1].hot, tuple(parts.items()))


def overlapped(compute_s: float, fixed_s: float, bytes_s: float, exposed: float, microbatches: int) -> float:
    """One microbatch: compute and exchange in sequence. Two: the longer hides the shorter, but moving bytes takes cores
    and memory bandwidth from compute.
    """
    exchange_s = fixed_s + bytes_s
    if microbatches == 1:
        return compute_s + exchange_s
    return max(compute_s, exchange_s) + exposed * min(compute_s, bytes_s)
