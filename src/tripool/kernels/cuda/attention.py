"""Attention over paged KV described on the device: grouped-query and latent, prompt form and decode form.

In 16 bits on CUDA all go through Triton kernels (`*_fused`), with all prompt sequences of a step in one launch.
Otherwise prompt form: torch's fused kernel, one group of equally shaped sequences at a time. Decode form: every
request's blocks are gathered and attended under a mask. That copies the context, but supports any width, and nothing
depends on lengths that only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tripool.core import BLOCK_TOKENS
from tripool.kernels.cuda.rows import DeviceRows, PagedRows, PromptGroup, context


def gqa(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: DeviceRows,
    num_prompt_rows: int,
    kv_heads: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """q [rows, heads, dim], prompt rows first; kv [slots, 2 * kv_heads * dim]; out [rows, heads * dim]."""
    n = num_prompt_rows
    if rows.seqs:
        out[:n] = attend_prompt(q[:n], kv, rows.prompts, kv_heads, scale)
    if rows.decodes is not None:
        out[n:] = attend_decode(q[n:], kv, rows.decodes, kv_heads, scale)


def gqa_fused(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: DeviceRows,
    num_prompt_rows: int,
    kv_heads: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """The same with Triton kernels."""
    from tripool.kernels.triton.gqa_decode import gqa_decode
    from tripool.kernels.triton.gqa_prefill import gqa_prefill

    n = num_prompt_rows
    if rows.seqs:
        prompts = rows.prompt_index
        gqa_prefill(q[:n], kv, prompts.index, scale, low=prompts.has_first, out=out[:n])
    if rows.decodes is not None:
        paged = rows.decodes
        table, lengths = paged.block_table, paged.seq_lens
        gqa_decode(q[n:], kv, table, lengths, scale, queries=paged.queries, first=paged.first, out=out[n:])


def attend_prompt(
    q: torch.Tensor, kv: torch.Tensor, groups: Sequence[PromptGroup], kv_heads: int, scale: float
) -> torch.Tensor:
    """q [rows, heads, dim]; kv [slots, 2 * kv_heads * dim]; result [rows, heads * dim]."""
    rows, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        stop = group.start + group.count
        pairs = context(kv, group.block_table)[:, group.first : stop].unflatten(2, (2, kv_heads, dim))
        keys, values = pairs.unbind(2)
        out[group.rows] = _fused(q[group.rows], keys, values, group, scale, gqa=heads != kv_heads)
    return out.view(rows, heads * dim)


def mla_prompt(
    q: torch.Tensor, kv: torch.Tensor, seqs: DeviceRows, up: torch.Tensor, nope: int, scale: float, out: torch.Tensor
) -> None:
    """Expanded. q [rows, heads, nope + rope]; kv [slots, rank + rope]; up [heads, nope + v, rank]; out [rows,
    heads * v]."""
    heads, width = q.shape[1:]
    rank, v = up.shape[2], up.shape[1] - nope
    for group in seqs.prompts:
        seen = context(kv, group.block_table)[:, group.first : group.start + group.count]
        expanded = F.linear(seen[..., :rank], up.flatten(0, 1)).unflatten(2, (heads, nope + v))
        rotated = seen[:, :, None, rank:].expand(-1, -1, heads, -1)
        keys = torch.cat((expanded[..., :nope], rotated), dim=3)
        values = F.pad(expanded[..., nope:], (0, width - v))  # the fused kernel needs one width
        out[group.rows] = _fused(q[group.rows], keys, values, group, scale)[..., :v].flatten(1)


def mla_prompt_fused(
    q: torch.Tensor, kv: torch.Tensor, seqs: DeviceRows, up: torch.Tensor, nope: int, scale: float, out: torch.Tensor,
    *, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> None:  # fmt: skip
    """The same in three launches. `product`: of the gathered latents with the up-projection."""
    from tripool.kernels.triton.mla_prefill import mla_prefill

    heads, width, rank = up.shape
    for part in seqs.prompt_contexts:
        seen = kv.index_select(0, part.slots)
        expanded = product(seen[:, :rank], up.view(-1, rank)).view(-1, heads, width)
        mla_prefill(q[part.rows], expanded, seen[:, rank:], part.index, scale, nope=nope, out=out[part.rows])


def _fused(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: PromptGroup, scale: float, *, gqa: bool = False
) -> torch.Tensor:
    """q [requests * count, heads, dim]; keys and values [requests, tokens, kv_heads, dim]; like q."""
    attended = F.scaled_dot_product_attention(
        q.unflatten(0, (-1, group.count)).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if group.is_whole else group.seen(),
        is_causal=group.is_whole,
        scale=scale,
        enable_gqa=gqa,
    )
    return attended.transpose(1, 2).flatten(0, 1)


def attend_decode(q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, kv_heads: int, scale: float) -> torch.Tensor:
    """As `attend_prompt`, for decode rows."""
    total, heads, dim = q.shape
    keys, values = context(kv, rows.block_table).unflatten(2, (2, kv_heads, dim)).unbind(2)
    attended = F.scaled_dot_product_attention(
        q.unflatten(0, (-1, rows.queries)).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=rows.seen[:, None],
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return attended.transpose(1, 2).reshape(total, heads * dim)


def latent_decode(q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, rank: int, scale: float) -> torch.Tensor:
    """Absorbed. q [rows, heads, rank + rope]; kv [slots, rank + rope]; result [rows, heads, rank]."""
    queries = q.unflatten(0, (-1, rows.queries))
    seen = context(kv, rows.block_table)
    scores = torch.einsum("bqhk,btk->bqht", queries, seen).float() * scale
    weights = scores.masked_fill(~rows.seen[:, :, None], float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("bqht,btk->bqhk", weights, seen[..., :rank]).flatten(0, 1)


def by_head(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, heads, k] x w [heads, n, k]^T -> out [rows, heads, n], in place: torch's product takes any `out` whose
    last dimension is dense."""
    torch.bmm(x.transpose(0, 1), w.mT, out=out.transpose(0, 1))


def latent_decode_fused(
    q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, rank: int, scale: float, *, invariant: bool = False
) -> torch.Tensor:
    """The same with `triton.mla_decode`, which reads the context once, in place. `invariant`: cut at fixed tokens."""
    if rows.first:  # only the MTP layer, which hides its first slot
        return latent_decode(q, kv, rows, rank, scale)
    from tripool.kernels.triton.mla_decode import INVARIANT_SPLIT_TOKENS, mla_decode

    split_tokens = INVARIANT_SPLIT_TOKENS if invariant else None
    queries = q.unflatten(0, (-1, rows.queries)).contiguous()
    blocks = kv.view(-1, BLOCK_TOKENS, kv.shape[1])
    return mla_decode(
        queries, blocks, rows.block_table, rows.seq_lens, scale, rank=rank, split_tokens=split_tokens
    ).flatten(0, 1)
