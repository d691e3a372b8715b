"""Cost of prefill: one batch of packed prompts. Cached prefixes are loaded first, not computed."""

from __future__ import annotations

from tripool.planner.cost.exchange import prefill_exchange, reduce_s
from tripool.planner.cost.layer import LayerModel, attention_s, overlapped
from tripool.planner.cost.setup import Routing, Setup, StepCost, named_routing
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape


class PrefillModel:
    """Batch times of one prefill instance."""

    def __init__(self, hardware: Hardware, model: ModelShape, setup: Setup, routing: Routing | None = None) -> None:
        self.hardware, self.model, self.setup = hardware, model, setup
        self.routing = routing or named_routing()
        self._layer = LayerModel(hardware, model, setup, self.routing)

    def step_s(self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory") -> float:
        return self.step(tokens, prompt, cached, plane=plane).seconds

    def step(self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory") -> StepCost:
        """`tokens` new tokens per rank, of prompts of `prompt` tokens of which `cached` are in the pool."""
        assert 0.0 <= cached < prompt
        load_s = self._load_s(tokens * cached / (prompt - cached), plane)
        scores_s = self._scores_s(tokens, cached + (prompt - cached) / 2)
        moe_s, moe_parts, hot = self._moe_layer(tokens, scores_s)
        dense_s, dense_parts = self._dense_layer(tokens, scores_s)
        moe_layers, dense_layers = self.model.moe_layers, self.model.dense_layers
        rows = tokens / prompt  # only a prompt's last position needs the head
        head_s = self._layer.head_s(rows)
        parts = {"head": head_s, "step": self.hardware.step_s, "cached prefix": load_s}
        for count, layer_parts in ((moe_layers, moe_parts), (dense_layers, dense_parts)):
            for name, seconds in layer_parts:
                parts[name] = parts.get(name, 0.0) + count * seconds
        total_s = moe_layers * moe_s + dense_layers * dense_s + head_s + self.hardware.step_s + load_s
        exchange_s = parts.get("dispatch", 0.0) + parts.get("combine", 0.0)
        compute_s = sum(parts.values()) - exchange_s
        return StepCost(
            total_s, compute_s, exchange_s, max(0.0, compute_s + exchange_s - total_s), hot, tuple(parts.items())
        )

    def tokens_per_s_per_chip(
        self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory"
    ) -> float:
        """Prompt tokens, cached ones included."""
        prompts = tokens / (prompt - cached)
        return prompts * prompt * self.hardware.ranks / self.step_s(tokens, prompt, cached, plane=plane)

    def _load_s(self, cached_tokens: float, plane: str) -> float:
        """Time to load `cached_tokens` per rank from the pool before the batch starts."""
        num_bytes = cached_tokens * self.model.kv_bytes_per_token(self.setup.kv_element_bytes) * self.hardware.ranks
        return num_bytes / self.hardware.cache_bytes_per_s[plane]

    def _scores_s(self, tokens: float, mean_context: float) -> float:
        flops = tokens * mean_context * self.model.attention.prefill_flops
        return attention_s(self.hardware, flops, 0.0)

    def _moe_layer(self, tokens: float, scores_s: float) -> tuple[float, tuple[tuple[str, float], ...], float]:
        if self.model.moe is None:
            return 0.0, (), 1.0
        layer, setup, hardware, count = self._layer, self.setup, self.hardware, self.setup.microbatches
        share = tokens / count
        work = layer.experts(share, self.routing.prefill_drift)
        moved = prefill_exchange(hardware, self.model, setup.precision, ep=setup.ep, tokens=share, hot=work.hot)
        stack = hardware.prefill_stack
        parts: tuple[tuple[str, float], ...] = (
            ("projections", stack * count * layer.projections_s(share)),
            ("attention", stack * scores_s),
            ("experts", stack * count * work.seconds),
            ("shared expert", stack * count * layer.shared_s(share)),
            ("activations", stack * count * layer.passes_s(share)),
            ("tensor parallel", count * reduce_s(hardware, self.model, tp=setup.tp, tokens=share * setup.tp)),
            ("layer", hardware.layer_s),
        )
        worked_s = sum(seconds for _, seconds in parts)
        parts = (*parts, ("jitter", layer.jitter_s(worked_s)))
        compute_s = worked_s + layer.jitter_s(worked_s)
        if count > 1:
            compute_s /= 1.0 - hardware.exchange.prefill_core_share
        fixed_s, bytes_s = count * moved.fixed_s, count * moved.bytes_s
        seconds = overlapped(compute_s, fixed_s, bytes_s, hardware.exchange.prefill_exposed, count)
        exchanged = (("dispatch", count * moved.dispatch_s), ("combine", count * moved.combine_s))
        return seconds, (*parts, *exchanged), work.hot

    def _dense_layer(self, tokens: float, scores_s: float) -> tuple[float, tuple[tuple[str, float], ...]]:
        layer, tp, stack = self._layer, self.setup.tp, self.hardware.prefill_stack
        parts = (
            ("projections", stack * layer.projections_s(tokens)),
            ("attention", stack * scores_s),
            ("dense FFN", stack * layer.dense_s(tokens)),
            ("activations", stack * layer.passes_s(tokens)),
            ("tensor parallel", 2 * reduce_s(self.hardware, self.model, tp=tp, tokens=tokens * tp)),
            ("layer", self.hardware.layer_s),
        )
        return sum(seconds for _, seconds in parts), parts
