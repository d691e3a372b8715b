"""Sublayers of a layer in plain steps over any set of operations: what fused kernels compute, written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tripool.kernels.batch import Batch
from tripool.kernels.ops import LinearOp, Ops
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm

if TYPE_CHECKING:
    from tripool.kernels.table import DraftParts


def _normed(ops: Ops, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return ops.rms_norm(x, norm.gain, norm.eps)


class Join:
    """Norms two rows and projects their concatenation to one."""

    def __init__(self, ops: Ops, weights: JoinWeights) -> None:
        self._ops, self._w = ops, weights
        self._linear = ops.linear(weights.weight, None)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ops, w = self._ops, self._w
        return self._linear(torch.cat((_normed(ops, left, w.left), _normed(ops, right, w.right)), dim=1))


class GroupedAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, ops: Ops, weights: GqaWeights) -> None:
        self._ops, self._w = ops, weights
        self._qkv = ops.linear(weights.qkv, weights.qkv_bias)
        self._out = ops.linear(weights.out, weights.out_bias)
        self.num_bytes = self._qkv.num_bytes + self._out.num_bytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        ops, w = self._ops, self._w
        rows, rotated = len(x), w.heads + w.kv_heads
        assert batch.cos_sin is not None
        qkv = self._qkv(_normed(ops, x, w.norm)).view(rows, rotated + w.kv_heads, w.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            qkv[:, : w.heads] = _normed(ops, qkv[:, : w.heads], w.q_norm)
            qkv[:, w.heads : rotated] = _normed(ops, qkv[:, w.heads : rotated], w.k_norm)
        ops.rope_(qkv[:, :rotated], batch.cos_sin)
        kv.index_copy_(0, batch.slot_mapping, qkv[:, w.heads :].flatten(1))
        q, n = qkv[:, : w.heads], batch.num_prompt_rows
        parts = []
        if n > 0:
            parts.append(ops.attend_prompt(q[:n], kv, batch.prompts, w.kv_heads, w.scale))
        if n < rows:
            parts.append(ops.attend_decode(q[n:], kv, batch.decodes, w.kv_heads, w.scale))
        x += self._out(parts[0] if len(parts) == 1 else torch.cat(parts))


class LatentAttention:
    """Multi-head latent attention: low-rank queries, keys and values from a shared latent (DeepSeek)."""

    def __init__(self, ops: Ops, weights: LatentWeights) -> None:
        self._ops, self._w = ops, weights
        self._down = ops.linear(weights.down, weights.down_bias)
        self._core = ops.mla(weights.core)
        self.num_bytes = self._down.num_bytes + self._core.num_bytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        ops, w, cos_sin = self._ops, self._w, batch.cos_sin
        assert cos_sin is not None
        queries = _normed(ops, x, w.norm)
        down = self._down(queries)
        if w.q_norm is not None:
            q_rank = len(w.q_norm.gain)
            queries, down = _normed(ops, down[:, :q_rank], w.q_norm), down[:, q_rank:]
        rank = len(w.kv_norm.gain)
        ops.rope_(down[:, None, rank:], cos_sin)
        down[:, :rank] = _normed(ops, down[:, :rank], w.kv_norm)
        kv.index_copy_(0, batch.slot_mapping, down)
        n = batch.num_prompt_rows
        if n > 0:
            x[:n] += self._core.prompt(queries[:n], kv, batch.prompts, cos_sin[:n])
        if n < len(x):
            x[n:] += self._core.decode(queries[n:], kv, batch.decodes, cos_sin[n:])


class _Swiglu:
    def __init__(self, ops: Ops, weights: MlpWeights) -> None:
        self._ops = ops
        self._gate_up: LinearOp = ops.linear(weights.gate_up, weights.gate_up_bias)
        self._down: LinearOp = ops.linear(weights.down, weights.down_bias)
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        return self._down(self._ops.swiglu(self._gate_up(normed)))


class Mlp:
    """A dense SwiGLU."""

    def __init__(self, ops: Ops, weights: MlpWeights) -> None:
        self._ops, self._norm = ops, weights.norm
        self._swiglu = _Swiglu(ops, weights)
        self.num_bytes = self._swiglu.num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        x += self._swiglu(_normed(self._ops, x, self._norm))


class MoeMlp:
    """Routed experts and an optional shared expert."""

    def __init__(self, ops: Ops, weights: MoeWeights) -> None:
        self._ops, self._w = ops, weights
        self._gate = ops.router(weights.gate)
        self._experts = ops.experts(weights.gate_up, weights.down)
        self._shared = None if weights.shared is None else _Swiglu(ops, weights.shared)
        self.num_bytes = self._gate.num_bytes + self._experts.num_bytes
        self.num_bytes += 0 if self._shared is None else self._shared.num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        normed = _normed(self._ops, x, self._w.norm)
        experts, weights = self._ops.route(self._gate(normed), self._w.gate_bias, self._w.plan)
        routed = self._experts(normed, experts, weights)
        x += routed if self._shared is None else routed + self._shared(normed)


class Draft:
    """The MTP layer: predicts token t + 2 from the final state at t and token t + 1."""

    def __init__(self, ops: Ops, parts: DraftParts) -> None:
        self._ops, self._parts = ops, parts

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        batch.cos_sin = parts.cos_sin.index_select(0, batch.positions)
        x = parts.join(parts.embed.index_select(0, batch.tokens), hidden)
        parts.attention(x, batch, kv)
        parts.mlp(x)
        return _normed(self._ops, x, parts.norm)

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self._parts.head(self.hidden(batch, hidden, kv)[list(rows)])
