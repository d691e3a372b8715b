"""Cost of the steps of one instance: a step of a running decode batch, or a prefill batch of packed prompts.

Fast enough for a simulator to call at every step.
"""

from __future__ import annotations

from math import sqrt

from tripool.planner.cost.exchange import Exchanged, decode_exchange, prefill_exchange
from tripool.planner.cost.layer import ExpertWork, LayerModel, attention_s, step_cost
from tripool.planner.cost.setup import Routing, Setup, StepCost, named_routing
from tripool.planner.cost.skew import deviations
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape


class _Instance:
    def __init__(self, hardware: Hardware, model: ModelShape, setup: Setup, routing: Routing | None = None) -> None:
        self.hardware, self.model, self.setup = hardware, model, setup
        self.routing = routing or named_routing()
        self._layer = LayerModel(hardware, model, setup, self.routing)


class DecodeModel(_Instance):
    """Step times of one decode instance."""

    def step_s(self, requests: float, context_tokens: float) -> float:
        """Time of a step with `requests` per rank, whose contexts sum to `context_tokens` per rank."""
        return self.step(requests, context_tokens / requests if requests else 0.0).seconds

    def step(self, requests: float, context: float, *, context_spread: float = 0.0) -> StepCost:
        """`requests` per rank with `context` cached tokens on average. `context_spread`: standard deviation of a
        request's context over the mean; the slowest rank has the longest contexts.
        """
        if requests and context_spread:
            context *= 1.0 + context_spread * deviations(self.setup.ep // self.setup.tp) / sqrt(requests)
        model, setup, layer = self.model, self.setup, self._layer
        tokens, scores_s = requests * setup.query_tokens, self._scores_s(requests, context)
        moe_layers = model.moe_layers + (setup.drafts if model.moe_layers else 0)
        dense_layers = model.dense_layers + (0 if model.moe_layers else setup.drafts)
        layers = []
        if moe_layers:
            drift, exposed = self.routing.decode_drift, self.hardware.exchange.decode_exposed
            layers.append((moe_layers, layer.moe_layer(tokens, scores_s, self._exchange, drift=drift, exposed=exposed)))
        if dense_layers:
            layers.append((dense_layers, layer.dense_layer(tokens, scores_s)))
        head_s = (1 + setup.drafts) * layer.head_s(tokens)
        return step_cost(layers, {"head": head_s, "step": self.hardware.step_s})

    def tpot_s(self, requests: float, context: float) -> float:
        return self.step(requests, context).seconds / self.setup.tokens_per_step

    def tokens_per_s_per_chip(self, requests: float, context: float) -> float:
        return requests * self.hardware.ranks / self.tpot_s(requests, context)

    def _scores_s(self, requests: float, context: float) -> float:
        attention, tp = self.model.attention, self.setup.tp
        flops = requests * self.setup.query_tokens * context * attention.decode_flops
        cached = requests * tp / attention.kv_split(tp) * context * attention.kv_width * self.setup.kv_element_bytes
        return attention_s(self.hardware, flops, cached)

    def _exchange(self, tokens: float, work: ExpertWork) -> Exchanged:
        setup = self.setup
        return decode_exchange(
            self.hardware, self.model, setup.precision, ep=setup.ep, tokens=tokens, hot_tokens=work.hot_tokens
        )


class PrefillModel(_Instance):
    """Batch times of one prefill instance. Cached prefixes are loaded first, not computed."""

    def step_s(self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory") -> float:
        return self.step(tokens, prompt, cached, plane=plane).seconds

    def step(self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory") -> StepCost:
        """`tokens` new tokens per rank, of prompts of `prompt` tokens of which `cached` are in the pool."""
        assert 0.0 <= cached < prompt
        hardware, stack = self.hardware, self.hardware.prefill_stack
        scores_s = self._scores_s(tokens, cached + (prompt - cached) / 2)
        layers = [(self.model.dense_layers, self._layer.dense_layer(tokens, scores_s, stack=stack))]
        if self.model.moe is not None:
            moe = self._layer.moe_layer(
                tokens, scores_s, self._exchange, drift=self.routing.prefill_drift, stack=stack,
                exposed=hardware.exchange.prefill_exposed, core_share=hardware.exchange.prefill_core_share,
            )  # fmt: skip
            layers.insert(0, (self.model.moe_layers, moe))
        head_s = self._layer.head_s(tokens / prompt)  # only a prompt's last position needs the head
        load_s = self._load_s(tokens * cached / (prompt - cached), plane)
        return step_cost(layers, {"head": head_s, "step": hardware.step_s, "cached prefix": load_s})

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

    def _exchange(self, tokens: float, work: ExpertWork) -> Exchanged:
        setup = self.setup
        return prefill_exchange(self.hardware, self.model, setup.precision, ep=setup.ep, tokens=tokens, hot=work.hot)
