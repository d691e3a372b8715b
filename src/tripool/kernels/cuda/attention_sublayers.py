"""Attention sublayers and the MTP draft over batches described on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.batch import Batch
from tripool.kernels.cuda import attention
from tripool.kernels.cuda.elementwise import normed, rope_
from tripool.kernels.cuda.invariant_linear import check_width
from tripool.kernels.cuda.make import AnyRows, Make, norm_for
from tripool.kernels.cuda.quantized_linear import Linear8
from tripool.kernels.cuda.rows import PagedRows, device_rows
from tripool.kernels.table import DraftParts
from tripool.kernels.weight_store import decided
from tripool.kernels.weights import INT8, GqaWeights, LatentWeights

_PACKED = torch.empty(0)
"""In place of a weight that a sublayer has packed: the floats must not stay in memory."""


class GroupedAttention:
    def __init__(self, make: Make, weights: GqaWeights) -> None:
        self._w = replace(weights, qkv=_PACKED, out=_PACKED)
        self._qkv = make.linear(weights.qkv, weights.qkv_bias, weights.qkv_scales)
        self._out = make.linear(weights.out, weights.out_bias, weights.out_scales)
        self._norm = norm_for(weights.norm, self._qkv, fused=make.fused)
        self._rope_cache = rope_cache_fused if make.fused else rope_cache
        self._attend = attention.gqa_fused if make.fused else attention.gqa
        self._exact = make.invariant is not None
        self.num_bytes = self._qkv.num_bytes + self._out.num_bytes
        self.out_width = weights.heads * weights.head_dim

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        q = self.before(x, batch, kv)
        attended = q.new_empty(len(q), self.out_width)
        self.attend(q, batch, kv, attended)
        self.after(x, attended)

    def before(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        return self._rope_cache(self._w, self._qkv(self._norm(x)), batch, kv)

    def attend(self, q: torch.Tensor, batch: Batch, kv: torch.Tensor, out: torch.Tensor) -> None:
        w, rows = self._w, device_rows(batch)
        if self._exact:
            rows.separate_queries()
        self._attend(q, kv, rows, batch.num_prompt_rows, w.kv_heads, w.scale, out)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        self._out.add_to(x, attended)


def rope_cache(w: GqaWeights, qkv: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    """Takes the product of queries, keys and values: normalises and rotates heads, writes keys and values into the
    cache and returns the queries [rows, heads, dim]."""
    assert batch.cos_sin is not None
    rotated = w.heads + w.kv_heads
    qkv = qkv.unflatten(1, (rotated + w.kv_heads, w.head_dim))
    if w.q_norm is not None and w.k_norm is not None:
        qkv[:, : w.heads] = normed(qkv[:, : w.heads], w.q_norm)
        qkv[:, w.heads : rotated] = normed(qkv[:, w.heads : rotated], w.k_norm)
    rope_(qkv[:, :rotated], batch.cos_sin)
    kv.index_copy_(0, batch.slot_mapping, qkv[:, w.heads :].flatten(1))
    return qkv[:, : w.heads]


def rope_cache_fused(w: GqaWeights, qkv: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
    from tripool.kernels.triton.rope_cache import rope_cache

    assert batch.cos_sin is not None
    return rope_cache(
        qkv, batch.cos_sin, batch.slot_mapping, kv, heads=w.heads, kv_heads=w.kv_heads, q_norm=w.q_norm, k_norm=w.k_norm
    )


def prologue(
    w: LatentWeights, down: torch.Tensor, batch: Batch, kv: torch.Tensor, q_rope: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Takes the joint down-projection: writes the normed latent and the rotated key into the cache and returns the
    normed query part, if there is one. Queries that are ready are rotated in place (`q_rope` [rows, heads, rope])."""
    assert batch.cos_sin is not None
    queries = None
    if q_rope is not None:
        rope_(q_rope, batch.cos_sin)
    if w.q_norm is not None:
        q_rank = len(w.q_norm.gain)
        queries, down = normed(down[:, :q_rank], w.q_norm), down[:, q_rank:]
    rank = len(w.kv_norm.gain)
    rope_(down[:, None, rank:], batch.cos_sin)
    down[:, :rank] = normed(down[:, :rank], w.kv_norm)
    kv.index_copy_(0, batch.slot_mapping, down)
    return queries


def prologue_fused(
    w: LatentWeights, down: torch.Tensor, batch: Batch, kv: torch.Tensor, q_rope: torch.Tensor | None = None, *,
    int8: bool = False,
) -> AnyRows | None:  # fmt: skip
    """`int8`: the query part is returned in 8 bits."""
    from tripool.kernels.triton.mla_prologue import mla_prologue

    assert batch.cos_sin is not None
    q_gain, q_eps = (None, 0.0) if w.q_norm is None else (w.q_norm.gain, w.q_norm.eps)
    queries, scales = mla_prologue(
        down, q_gain, w.kv_norm.gain, batch.cos_sin, device_rows(batch).order, batch.slot_mapping,
        kv.view(-1, BLOCK_TOKENS, kv.shape[1]), q_eps=q_eps, kv_eps=w.kv_norm.eps, int8=int8,
        q_rope=q_rope,
    )  # fmt: skip
    if w.q_norm is None:
        return None
    return (queries, scales) if int8 else queries


def apply_rope_(q_rope: torch.Tensor, batch: Batch) -> None:
    assert batch.cos_sin is not None
    rope_(q_rope, batch.cos_sin)


def apply_rope_fused_(q_rope: torch.Tensor, batch: Batch) -> None:
    from tripool.kernels.triton.mla_prologue import rope_queries

    assert batch.cos_sin is not None
    rope_queries(q_rope, batch.cos_sin, device_rows(batch).order, q_rope)


class LatentAttention:
    def __init__(self, make: Make, weights: LatentWeights) -> None:
        core = weights.core
        shape = replace(core, query=_PACKED, up=_PACKED, out=_PACKED)
        self._w = replace(weights, down=_PACKED, core=shape)
        self._up = make.store.keep("up", lambda: core.up.to(make.dtype))
        self._joint = None
        """Both products of the normed rows in one, where queries have no low rank."""
        may_join = weights.q_norm is None and weights.down_bias is None
        if may_join and decided(make.store, "joint", lambda: _alike(make, weights)):
            # Queries first: their rows are a multiple of the 128 that share a scale in e4m3.
            scales = [one for one in (core.query_scales, weights.down_scales) if one is not None]
            joint = torch.cat((core.query.to(weights.down.dtype), weights.down))
            self._joint = make.linear(joint, None, torch.cat(scales) if scales else None)
            first, self.num_bytes = [self._joint], self._joint.num_bytes
        else:
            self._down = make.linear(weights.down, weights.down_bias, weights.down_scales)
            self._query = make.linear(core.query, None, core.query_scales)
            first = [self._down] if weights.q_norm else [self._down, self._query]
            self.num_bytes = self._down.num_bytes + self._query.num_bytes
        self._out = make.linear(core.out, core.out_bias, core.out_scales)
        self._norm = norm_for(weights.norm, *first, fused=make.fused)
        integers = self._joint is None and isinstance(self._query, Linear8) and self._query.quantized.stored == INT8
        self._prologue: Callable[..., AnyRows | None]
        self._prologue = partial(prologue_fused, int8=integers) if make.fused else prologue
        self._apply_rope_ = apply_rope_fused_ if make.fused else apply_rope_
        self._prompt = attention.mla_prompt_fused if make.fused else attention.mla_prompt
        self._latent_decode = attention.latent_decode_fused if make.fused else attention.latent_decode
        self._by_head, self._exact = attention.by_head, make.invariant is not None
        if make.invariant is not None:
            check_width(self._up.shape[2])
            self._by_head = make.invariant.by_head
            self._prompt = partial(attention.mla_prompt_fused, product=make.invariant.product)
            self._latent_decode = partial(attention.latent_decode_fused, invariant=True)
        self.num_bytes += self._out.num_bytes + self._up.nbytes
        self.out_width = self._up.shape[0] * (self._up.shape[1] - core.nope)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        q = self.before(x, batch, kv)
        attended = q.new_empty(len(q), self.out_width)
        self.attend(q, batch, kv, attended)
        self.after(x, attended)

    def before(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        outer, heads, nope = self._norm(x), self._up.shape[0], self._w.core.nope
        if self._joint is not None:
            q, down = self._joint(outer).tensor_split([-kv.shape[1]], dim=1)
            q = q.unflatten(1, (heads, -1))
            self._prologue(self._w, down, batch, kv, q[..., nope:])
            return q
        inner = self._prologue(self._w, self._down(outer), batch, kv)
        q = self._query(outer if inner is None else inner).unflatten(1, (heads, -1))
        self._apply_rope_(q[..., nope:], batch)
        return q

    def attend(self, q: torch.Tensor, batch: Batch, kv: torch.Tensor, out: torch.Tensor) -> None:
        core, rows, n = self._w.core, device_rows(batch), batch.num_prompt_rows
        if self._exact:
            rows.separate_queries()
        if rows.seqs:
            self._prompt(q[:n], kv, rows, self._up, core.nope, core.scale, out[:n])
        if rows.decodes is not None:
            self._decode(q[n:], kv, rows.decodes, out[n:])

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        self._out.add_to(x, attended)

    def _decode(self, q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, out: torch.Tensor) -> None:
        """Absorbed form: projects the query into the latent space, attends there, and projects the result to values.
        Both products write where they are read."""
        nope, rank, heads = self._w.core.nope, self._up.shape[2], q.shape[1]
        key_up, value_up = self._up[:, :nope], self._up[:, nope:]
        q_latent = q.new_empty(len(q), heads, kv.shape[1])
        self._by_head(q[..., :nope], key_up.mT, q_latent[..., :rank])
        q_latent[..., rank:] = q[..., nope:]
        latent = self._latent_decode(q_latent, kv, rows, rank, self._w.core.scale)
        self._by_head(latent, value_up, out.unflatten(1, (heads, -1)))


def _alike(make: Make, weights: LatentWeights) -> bool:
    """Whether the down-projection and the queries are stored in one form."""
    forms = {
        make.quantized is not None and make.quantized.held(weight, scales) is not None
        for weight, scales in ((weights.down, weights.down_scales), (weights.core.query, weights.core.query_scales))
    }
    given = {None if scales is None else scales.dim() for scales in (weights.down_scales, weights.core.query_scales)}
    return len(forms) == len(given) == 1


class Draft:
    def __init__(self, parts: DraftParts) -> None:
        self._parts = parts

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        batch.cos_sin = parts.cos_sin.index_select(0, batch.positions)
        x = parts.join(parts.embed.index_select(0, batch.tokens), hidden)
        parts.attention(x, batch, kv)
        parts.mlp(x)
        return normed(x, parts.norm)

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        final = self.hidden(batch, hidden, kv)
        if len(rows) < len(final):  # indexing copies to the device, which a graph cannot capture
            final = final[torch.tensor(list(rows), dtype=torch.int64).to(final.device)]
        return self._parts.head(final)
