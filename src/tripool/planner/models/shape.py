"""Shape of a network for the planner: numbers of parameters, operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Latent attention: one small vector per token is cached, for any number of heads."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    """Sparse attention: an indexer scores the whole cache in 8 bits and chooses so many tokens; 0: all are read."""

    def params(self, hidden: int) -> int:
        q_width = self.heads * (self.nope + self.rope)
        query = hidden * self.q_rank + self.q_rank * q_width + self.q_rank if self.q_rank else hidden * q_width
        latent = hidden * (self.kv_rank + self.rope) + self.kv_rank
        expand = self.kv_rank * self.heads * (self.nope + self.v)
        index = (self.q_rank or hidden) * self.index_heads * self.index_dim
        index += hidden * (self.index_dim + self.index_heads) + 2 * self.index_dim if self.index_topk else 0
        return query + latent + expand + self.heads * self.v * hidden + index

    @property
    def kv_width(self) -> int:
        return self.kv_rank + self.rope

    @property
    def decode_flops(self) -> int:
        """Per query token and cached token: absorbed, every head against the latent vector."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope)

    @property
    def prefill_flops(self) -> int:
        """Per pair of tokens, expanded to heads."""
        return 2 * self.heads * (self.nope + self.rope + self.v)

    def kv_split(self, tp: int) -> int:
        """Ways in which tensor parallelism splits the cache: none, every head reads all of it."""
        return 1

    def attended(self, context: float) -> float:
        """Cached tokens that one query reads."""
        return min(context, float(self.index_topk)) if self.index_topk else context

    @property
    def index_flops(self) -> int:
        """Per query token and cached token, in 8 bits."""
        return 2 * self.index_heads * self.index_dim

    @property
    def index_bytes(self) -> int:
        """Per cached token: the indexer's key in 8 bits and its scale."""
        return self.index_dim + 4 if self.index_topk else 0


@dataclass(frozen=True, kw_only=True)
class Gqa:
    """Heads in groups that share keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    """The output is multiplied by a gate that is projected beside the query."""
    index_topk = index_flops = index_bytes = 0
    """Not sparse."""

    def params(self, hidden: int) -> int:
        q_width, kv_width = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        extra = (q_width + kv_width if self.bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return hidden * ((3 if self.gated else 2) * q_width + kv_width) + extra

    @property
    def kv_width(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def decode_flops(self) -> int:
        return 4 * self.heads * self.head_dim

    @property
    def prefill_flops(self) -> int:
        return 4 * self.heads * self.head_dim

    def kv_split(self, tp: int) -> int:
        return min(tp, self.kv_heads)

    def attended(self, context: float) -> float:
        return context


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear attention (gated delta rule): a state of fixed size per request instead of a cache."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    def params(self, hidden: int) -> int:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        mixed = hidden * (2 * keys + 2 * values + 2 * self.value_heads) + (2 * keys + values) * self.conv
        return mixed + 2 * self.value_heads + self.value_dim + values * hidden

    @property
    def state_elements(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Kept in 32 bits."""
        return 4 * self.state_elements

    @property
    def flops(self) -> int:
        """Per token: decay and update of the state, and its product with key and query."""
        return 6 * self.state_elements


@dataclass(frozen=True, kw_only=True)
class Moe:
    experts: int
    top_k: int
    width: int
    shared_width: int
    """Of all shared experts together."""
    layers: int
    groups: int = 1
    groups_chosen: int = 1
    gate_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    hidden: int
    layers: int
    vocab: int
    attention: Mla | Gqa
    dense_width: int
    moe: Moe | None = None
    mtp_layers: int = 0
    mtp_accept: float = 0.7
    """Default share of accepted drafts."""
    tied_head: bool = False
    beside_fp4: str = "fp8"
    """Precision of all but the routed experts in published checkpoints whose experts are in FP4."""
    window: int = 0
    windowed_layers: int = 0
    """Layers whose attention reaches back `window` tokens."""
    linear: Linear | None = None
    linear_layers: int = 0

    @property
    def full_layers(self) -> int:
        """Layers whose attention reads the whole context."""
        return self.layers - self.windowed_layers - self.linear_layers

    @property
    def moe_layers(self) -> int:
        return self.moe.layers if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @cached_property
    def attention_total(self) -> int:
        """Of all layers."""
        linear = self.linear_layers * self.linear.params(self.hidden) if self.linear else 0
        return (self.layers - self.linear_layers) * self.attention.params(self.hidden) + linear

    @cached_property
    def attention_params(self) -> float:
        """Of one layer, on average."""
        return self.attention_total / self.layers

    @cached_property
    def dense_params(self) -> int:
        return 3 * self.hidden * self.dense_width

    @cached_property
    def expert_params(self) -> int:
        """Of one routed expert."""
        return 3 * self.hidden * self.moe.width if self.moe else 0

    @cached_property
    def shared_params(self) -> int:
        return 3 * self.hidden * self.moe.shared_width if self.moe else 0

    @cached_property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def _outside_experts(self) -> int:
        embed = self.head_params * (1 if self.tied_head else 2)
        norms = self.layers * 2 * self.hidden
        dense = self.dense_layers * self.dense_params
        gates = self.moe_layers * (self.moe.experts * (self.hidden + self.moe.gate_bias)) if self.moe else 0
        return embed + self.hidden + self.attention_total + norms + dense + gates + self.moe_layers * self.shared_params

    @cached_property
    def total_params(self) -> int:
        """Without the MTP layers, as model cards count."""
        return self._outside_experts + (self.moe_layers * self.moe.experts * self.expert_params if self.moe else 0)

    @cached_property
    def active_params(self) -> int:
        """Used for one token, embedding and head included."""
        return self._outside_experts + (self.moe_layers * self.moe.top_k * self.expert_params if self.moe else 0)

    @cached_property
    def flops_per_token(self) -> int:
        """Matrix products of one token outside attention scores: two per active parameter but the embedding."""
        lookup = 0 if self.tied_head else self.head_params
        return 2 * (self.active_params - lookup)

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> float:
        """Of the layers whose cache grows with the context."""
        return self.full_layers * (self.attention.kv_width * element_bytes + self.attention.index_bytes)

    def state_bytes(self, element_bytes: float = 2.0) -> float:
        """Per request, whatever its length: windows and the states of linear attention."""
        windows = self.windowed_layers * self.window * self.attention.kv_width * element_bytes
        return windows + (self.linear_layers * self.linear.state_bytes if self.linear else 0.0)
