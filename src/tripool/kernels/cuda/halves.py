"""The attention halves and the draft over rows described on the device; the other halves are the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.batch import Batch
from tripool.kernels.cuda import attention
from tripool.kernels.cuda.elementwise import rms_norm, rope_
from tripool.kernels.cuda.linear import Linear
from tripool.kernels.cuda.rows import PagedRows, device_rows
from tripool.kernels.shelf import Shelf
from tripool.kernels.table import DraftParts
from tripool.kernels.weights import GqaWeights, LatentWeights, Norm


@dataclass(frozen=True, slots=True)
class Make:
    """How a table makes its parts."""

    shelf: Shelf
    dtype: torch.dtype
    fused: bool
    """Whether Triton kernels may be used: on CUDA, in bfloat16."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return Linear(weight, bias, shelf=self.shelf, dtype=self.dtype)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(x, norm.gain, norm.eps)


class GroupedAttention:
    def __init__(self, make: Make, weights: GqaWeights) -> None:
        self._w = weights
        self._qkv = make.linear(weights.qkv, weights.qkv_bias)
        self._out = make.linear(weights.out, weights.out_bias)
        self.num_bytes = self._qkv.num_bytes + self._out.num_bytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        w, rows, n = self._w, device_rows(batch), batch.num_prompt_rows
        assert batch.turns is not None
        turned = w.heads + w.kv_heads
        qkv = self._qkv(_normed(x, w.norm)).unflatten(1, (turned + w.kv_heads, w.head_dim))
        if w.q_norm is not None and w.k_norm is not None:
            qkv[:, : w.heads] = _normed(qkv[:, : w.heads], w.q_norm)
            qkv[:, w.heads : turned] = _normed(qkv[:, w.heads : turned], w.k_norm)
        rope_(qkv[:, :turned], batch.turns)
        kv.index_copy_(0, batch.slots, qkv[:, w.heads :].flatten(1))
        q, parts = qkv[:, : w.heads], []
        if rows.prompts:
            parts.append(attention.attend_prompt(q[:n], kv, rows.prompts, w.kv_heads, w.scale))
        if rows.decodes is not None:
            parts.append(attention.attend_decode(q[n:], kv, rows.decodes, w.kv_heads, w.scale))
        x += self._out(parts[0] if len(parts) == 1 else torch.cat(parts))


def prologue(w: LatentWeights, down: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor | None:
    """Of the joint down-projection: the latent, normed, and the rotary key, turned, go into the cache; the queries'
    part comes back normed, if there is one."""
    assert batch.turns is not None
    queries = None
    if w.q_norm is not None:
        q_rank = len(w.q_norm.gain)
        queries, down = _normed(down[:, :q_rank], w.q_norm), down[:, q_rank:]
    rank = len(w.kv_norm.gain)
    rope_(down[:, None, rank:], batch.turns)
    down[:, :rank] = _normed(down[:, :rank], w.kv_norm)
    kv.index_copy_(0, batch.slots, down)
    return queries


def prologue_fused(w: LatentWeights, down: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor | None:
    from tripool.kernels.triton.mla_prologue import mla_prologue

    assert batch.turns is not None
    q_gain, q_eps = (None, 0.0) if w.q_norm is None else (w.q_norm.gain, w.q_norm.eps)
    queries, _ = mla_prologue(
        down, q_gain, w.kv_norm.gain, batch.turns, device_rows(batch).order, batch.slots,
        kv.view(-1, BLOCK_TOKENS, kv.shape[1]), q_eps=q_eps, kv_eps=w.kv_norm.eps, int8=False,
    )  # fmt: skip
    return None if w.q_norm is None else queries


def turn_(q_rope: torch.Tensor, batch: Batch) -> None:
    assert batch.turns is not None
    rope_(q_rope, batch.turns)


def turn_fused_(q_rope: torch.Tensor, batch: Batch) -> None:
    from tripool.kernels.triton.mla_prologue import rope_queries

    assert batch.turns is not None
    rope_queries(q_rope, batch.turns, device_rows(batch).order, q_rope)


class LatentAttention:
    def __init__(self, make: Make, weights: LatentWeights) -> None:
        self._w, core = weights, weights.core
        self._down = make.linear(weights.down, weights.down_bias)
        self._query = make.linear(core.query)
        self._out = make.linear(core.out, core.out_bias)
        self._up = make.shelf.keep("up", lambda: core.up.to(make.dtype))
        self._prologue, self._turn_ = (prologue_fused, turn_fused_) if make.fused else (prologue, turn_)
        self._latent_decode = attention.latent_decode_fused if make.fused else attention.latent_decode
        self.num_bytes = self._down.num_bytes + self._query.num_bytes + self._out.num_bytes + self._up.nbytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        w, rows, n = self._w, device_rows(batch), batch.num_prompt_rows
        assert batch.turns is not None
        normed = _normed(x, w.norm)
        inner = self._prologue(w, self._down(normed), batch, kv)
        q = self._query(normed if inner is None else inner).unflatten(1, (self._up.shape[0], -1))
        self._turn_(q[..., w.core.nope :], batch)
        parts = []
        if rows.prompts:
            parts.append(attention.mla_prompt(q[:n], kv, rows.prompts, self._up, w.core.nope, w.core.scale))
        if rows.decodes is not None:
            parts.append(self._decode(q[n:], kv, rows.decodes))
        x += self._out(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _decode(self, q: torch.Tensor, kv: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Absorbed: the query moves into latent space, attends there, and what it found is turned into values."""
        nope, rank = self._w.core.nope, self._up.shape[2]
        key_up, value_up = self._up[:, :nope], self._up[:, nope:]
        q_latent = q.new_empty(len(q), q.shape[1], kv.shape[1])
        q_latent[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), key_up).transpose(0, 1)
        q_latent[..., rank:] = q[..., nope:]
        latent = self._latent_decode(q_latent, kv, rows, rank, self._w.core.scale)
        return torch.bmm(latent.transpose(0, 1), value_up.mT).transpose(0, 1).flatten(1)


class Draft:
    def __init__(self, parts: DraftParts) -> None:
        self._parts = parts

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        batch.turns = parts.turns.index_select(0, batch.positions)
        x = parts.join(parts.embed.index_select(0, batch.tokens), hidden)
        parts.attention(x, batch, kv)
        parts.mlp(x)
        return _normed(x, parts.norm)

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        final = self.hidden(batch, hidden, kv)
        if len(rows) < len(final):  # choosing rows copies their numbers to the device, which no graph can hold
            final = final[torch.tensor(list(rows), dtype=torch.int64).to(final.device)]
        return self._parts.head(final)
