"""Cost of decode: one step of a running batch. Fast enough for a simulator to call at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from tripool.planner.cost.exchange import decode_exchange, reduce_s
from tripool.planner.cost.layer import LayerModel, attention_s, overlapped
from tripool.planner.cost.setup import Routing, Setup, StepCost, named_routing
from tripool.planner.cost.skew import deviations
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape


@dataclass(frozen=True, slots=True)
class _Layers:
    """Seconds of one MoE or dense layer."""

    seconds: float
    compute_s: float
    exchange_s: float
    hot: float
    parts: tuple[tuple[str, float], ...]


class DecodeModel:
    """StepCost times of one decode instance."""

    def __init__(self, hardware: Hardware, model: ModelShape, setup: Setup, routing: Routing | None = None) -> None:
        self.hardware, self.model, self.setup = hardware, model, setup
        self.routing = routing or named_routing()
        self._layer = LayerModel(hardware, model, setup, self.routing)

    def step_s(self, requests: float, context_tokens: float) -> float:
        """Time of a step with `requests` per rank, whose contexts sum to `context_tokens` per rank."""
        return self.step(requests, context_tokens / requests if requests else 0.0).seconds

    def step(self, requests: float, context: float, *, context_spread: float = 0.0) -> StepCost:
        """`requests` per rank with `context` cached tokens on average. `context_spread`: standard deviation of a
        request's context over the mean; the slowest rank has the longest contexts.
        """
        if requests and context_spread:
            context *= 1.0 + context_spread * deviations(self.setup.ep // self.setup.tp) / sqrt(requests)
        model, setup = self.model, self.setup
        moe_layers = model.moe_layers + (setup.drafts if model.moe_layers else 0)
        dense_layers = model.dense_layers + (0 if model.moe_layers else setup.drafts)
        kinds = []
        if moe_layers:
            kinds.append((moe_layers, self._moe_layer(requests, context)))
        if dense_layers:
            kinds.append((dense_layers, self._dense_layer(requests, context)))
        head_s = (1 + setup.drafts) * self._layer.head_s(requests * setup.query_tokens)
        step_s = self.hardware.step_s
        parts = {"head": head_s, "step": step_s}
        for count, layer in kinds:
            for name, seconds in layer.parts:
                parts[name] = parts.get(name, 0.0) + count * seconds
        total_s = head_s + step_s + sum(count * layer.seconds for count, layer in kinds)
        compute_s = head_s + step_s + sum(count * layer.compute_s for count, layer in kinds)
        exchange_s = sum(count * layer.exchange_s for count, layer in kinds)
        hidden_s = max(0.0, compute_s + exchange_s - total_s)
        return StepCost(total_s, compute_s, exchange_s, hidden_s, kinds[0][1].hot, tuple(parts.items()))

    def tpot_s(self, requests: float, context: float) -> float:
        return self.step(requests, context).seconds / self.setup.tokens_per_step

    def tokens_per_s_per_chip(self, requests: float, context: float) -> float:
        return requests * self.hardware.ranks / self.tpot_s(requests, context)

    def with_microbatches(self, microbatches: int) -> DecodeModel:
        return DecodeModel(self.hardware, self.model, replace(self.setup, microbatches=microbatches), self.routing)

    def _scores_s(self, requests: float, context: float) -> float:
        attention, tp = self.model.attention, self.setup.tp
        flops = requests * self.setup.query_tokens * context * attention.decode_flops
        cached = requests * tp / attention.kv_split(tp) * context * attention.kv_width * self.setup.kv_element_bytes
        return attention_s(self.hardware, flops, cached)

    def _moe_layer(self, requests: float, context: float) -> _Layers:
        layer, setup, hardware = self._layer, self.setup, self.hardware
        parts_count = setup.microbatches
        tokens = requests * setup.query_tokens / parts_count
        work = layer.experts(tokens, self.routing.decode_drift)
        moved = decode_exchange(
            hardware, self.model, setup.precision, ep=setup.ep, tokens=tokens, hot_tokens=work.hot_tokens
        )
        parts: tuple[tuple[str, float], ...] = (
            ("projections", parts_count * layer.projections_s(tokens)),
            ("attention", self._scores_s(requests, context)),
            ("experts", parts_count * work.seconds),
            ("shared expert", parts_count * layer.shared_s(tokens)),
            ("activations", parts_count * layer.passes_s(tokens)),
            ("tensor parallel", parts_count * reduce_s(hardware, self.model, tp=setup.tp, tokens=tokens * setup.tp)),
            ("layer", hardware.layer_s),
        )
        worked_s = sum(seconds for _, seconds in parts)
        parts = (*parts, ("jitter", layer.jitter_s(worked_s)))
        compute_s = worked_s + layer.jitter_s(worked_s)
        fixed_s, bytes_s = parts_count * moved.fixed_s, parts_count * moved.bytes_s
        seconds = overlapped(compute_s, fixed_s, bytes_s, hardware.exchange.decode_exposed, parts_count)
        exchanged = (("dispatch", parts_count * moved.dispatch_s), ("combine", parts_count * moved.combine_s))
        return _Layers(seconds, compute_s, fixed_s + bytes_s, work.hot, (*parts, *exchanged))

    def _dense_layer(self, requests: float, context: float) -> _Layers:
        layer, tokens = self._layer, requests * self.setup.query_tokens
        tp = self.setup.tp
        parts = (
            ("projections", layer.projections_s(tokens)),
            ("attention", self._scores_s(requests, context)),
            ("dense FFN", layer.dense_s(tokens)),
            ("activations", layer.passes_s(tokens)),
            ("tensor parallel", 2 * reduce_s(self.hardware, self.model, tp=tp, tokens=tokens * tp)),
            ("layer", self.hardware.layer_s),
        )
        seconds = sum(part for _, part in parts)
        return _Layers(seconds, seconds, 0.0, 1.0, parts)
