"""Cost of the steps of one instance: a step of a running decode batch, or a prefill batch of packed prompts.

Fast enough for a simulator to call at every step.
"""

from __future__ import annotations

from math import sqrt

from tripool.planner.cost.exchange import Exchanged, decode_exchange, prefill_exchange
from tripool.planner.cost.layer import ExpertWork, LayerCost, LayerModel, attention_s, index_s, memory_s, step_cost
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
        model, setup = self.model, self.setup
        if requests and context_spread:
            context *= 1.0 + context_spread * deviations(setup.attention_ranks // setup.tp) / sqrt(requests)
        layers = self._layers(requests, setup.query_tokens, context, model.moe_layers, model.dense_layers)
        tokens = requests * setup.query_tokens
        if setup.drafts:  # the first pass of the MTP layer is over all tokens of the step, the others over one each
            moe, dense = (1, 0) if model.moe_layers else (0, 1)
            layers += self._layers(requests, setup.query_tokens, context, moe, dense)
            others = setup.drafts - 1
            layers += self._layers(requests, 1, context, others * moe, others * dense)
        head_s = self._layer.head_s(tokens) + setup.drafts * self._layer.head_s(requests)
        step_s = self.hardware.step_s + (self.hardware.draft_s if setup.drafts else 0.0)
        step_s += self.hardware.agree_s if setup.attention_ranks > setup.tp else 0.0
        return step_cost(layers, {"head": head_s, "step": step_s})

    def _layers(
        self, requests: float, query_tokens: int, context: float, moe_layers: int, dense_layers: int
    ) -> list[tuple[int, LayerCost]]:
        """So many layers of each kind, over `query_tokens` of each request."""
        tokens, scores_s = requests * query_tokens, self._scores_s(requests, query_tokens, context)
        layers = []
        if moe_layers:
            drift, exposed = self.routing.decode_drift, self.hardware.exchange.decode_exposed
            moe = self._layer.moe_layer(tokens, scores_s, self._exchange, drift=drift, exposed=exposed)
            layers.append((moe_layers, moe))
        if dense_layers:
            layers.append((dense_layers, self._layer.dense_layer(tokens, scores_s)))
        return layers

    def tpot_s(self, requests: float, context: float) -> float:
        return self.step(requests, context).seconds / self.setup.tokens_per_step

    def tokens_per_s_per_chip(self, requests: float, context: float) -> float:
        """`requests` per rank that has any."""
        share = self.setup.attention_ranks / self.setup.ep
        return share * requests * self.hardware.ranks / self.tpot_s(requests, context)

    def _scores_s(self, requests: float, query_tokens: int, context: float) -> float:
        """Of one layer, on average over a model's kinds of attention."""
        model, attention, tp = self.model, self.model.attention, self.setup.tp
        queries = requests * query_tokens
        held = requests * tp / attention.kv_split(tp)

        def over(cached: float, *, sparse: bool = False) -> float:
            num_bytes = held * cached * attention.kv_width * self.setup.kv_element_bytes
            flops = queries * cached * attention.decode_flops
            return attention_s(self.hardware, flops, num_bytes, eight_bit=self.setup.attention_8bit, sparse=sparse)

        read = attention.attended(context)
        full_s = over(read, sparse=read < context)
        if attention.index_topk:
            scanned = held * context * attention.index_bytes
            full_s += index_s(self.hardware, queries * context * attention.index_flops, scanned)
        total_s = model.full_layers * full_s + model.windowed_layers * over(min(context, float(model.window)))
        if model.linear is not None:
            states_s = memory_s(self.hardware, 2.0 * requests * model.linear.state_bytes)  # read and written
            total_s += model.linear_layers * states_s
        return total_s / model.layers

    def _exchange(self, tokens: float, work: ExpertWork) -> Exchanged:
        setup = self.setup
        return decode_exchange(
            self.hardware, self.model, setup.precision, ep=setup.exchanging_ranks, tokens=tokens,
            hot_tokens=work.hot_tokens,
        )  # fmt: skip


class PrefillModel(_Instance):
    """Batch times of one prefill instance. Cached prefixes are loaded first, not computed."""

    def step_s(self, tokens: float, prompt: float, cached: float = 0.0, *, plane: str = "memory") -> float:
        return self.step(tokens, prompt, cached, plane=plane).seconds

    def step(
        self, tokens: float, prompt: float, cached: float = 0.0, *, own: float = 0.0, plane: str = "memory"
    ) -> StepCost:
        """`tokens` new tokens per rank, of prompts of `prompt` tokens of which `cached` are known; a share `own` of
        these in the instance's own memory, the others in the pool.
        """
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
        load_s = self._load_s((1.0 - own) * tokens * cached / (prompt - cached), plane)
        launched_s = self.model.layers * self._layer.launched_s
        waits_s = max(0.0, launched_s - sum(count * layer.seconds for count, layer in layers))
        fixed = {"head": head_s, "step": hardware.step_s, "cached prefix": load_s, "launches": waits_s}
        return step_cost(layers, fixed)

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
        """Of one layer, on average over a model's kinds of attention."""
        model, attention = self.model, self.model.attention

        def over(cached: float, flops: int, *, sparse: bool = False) -> float:
            work = tokens * cached * flops
            eight_bit = self.setup.attention_8bit
            return attention_s(self.hardware, work, 0.0, eight_bit=eight_bit, sparse=sparse, prefill=True)

        read = attention.attended(mean_context)
        full_s = over(mean_context, attention.prefill_flops)
        if read < mean_context:  # chosen tokens are read from the latent cache, without expanding it
            full_s = over(read, attention.decode_flops, sparse=True)
        if attention.index_topk:
            full_s += index_s(self.hardware, tokens * mean_context * attention.index_flops, 0.0)
        window_s = over(min(mean_context, float(model.window)), attention.prefill_flops)
        total_s = model.full_layers * full_s + model.windowed_layers * window_s
        if model.linear is not None:
            linear_s = attention_s(self.hardware, tokens * model.linear.flops, 0.0, prefill=True)
            total_s += model.linear_layers * linear_s
        return total_s / model.layers

    def _exchange(self, tokens: float, work: ExpertWork) -> Exchanged:
        setup = self.setup
        return prefill_exchange(
            self.hardware, self.model, setup.precision, ep=setup.exchanging_ranks, tokens=tokens, hot=work.hot
        )
