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

    def params(self, hidden: int) -> int:
        q_width = self.heads * (self.nope + self.rope)
        query = hidden * self.q_rank + self.q_rank * q_width + self.q_rank if self.q_rank else hidden * q_width
        latent = hidden * (self.kv_rank + self.rope) + self.kv_rank
        expand = self.kv_rank * self.heads * (self.nope + self.v)
        return query + latent + expand + self.heads * self.v * hidden

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


@dataclass(frozen=True, kw_only=True)
class Gqa:
    """Heads in groups that share keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm: bool = False

    def params(self, hidden: int) -> int:
        q_width, kv_width = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        extra = (q_width + kv_width if self.bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return hidden * (2 * q_width + kv_width) + extra

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

    @property
    def moe_layers(self) -> int:
        return self.moe.layers if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @cached_property
    def attention_params(self) -> int:
        """Of one layer."""
        return self.attention.params(self.hidden)

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
        layer = self.attention_params + 2 * self.hidden
        dense = self.dense_layers * self.dense_params
        gates = self.moe_layers * (self.moe.experts * (self.hidden + self.moe.gate_bias)) if self.moe else 0
        return embed + self.hidden + self.layers * layer + dense + gates + self.moe_layers * self.shared_params

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
        return self.layers * self.attention.kv_width * element_bytes
