"""Latent attention in prompt form on CUDA, expanded: all sequences of a step in one launch.

The caller gathers the latents of all contexts, one sequence after the other, and expands them with one product to keys
and values of every head. A tile is some query tokens of one sequence and one head; tiles find their sequence as in
`gqa_prefill`. Keys are two parts, the expanded one and the rotated one, which all heads share: nothing is concatenated
or padded in memory.

Each row adds its tokens in blocks counted from its context's first token, so its bits do not depend on how a prompt was
cut into chunks, nor on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tripool.kernels.triton.gqa_prefill import SEQUENCES_AT_ONCE, sequence_of
from tripool.kernels.triton.paged_attention import LOG2E, precision_of

INDEX_COLUMNS = 4
"""Columns of the index: first row, number of rows, tokens before the first row, first token among the gathered."""


@dataclass(frozen=True, slots=True)
class Tiling:
    block_rows: int = 128
    block_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 3


FEW_ROWS = Tiling(block_rows=64, num_warps=4, num_stages=2)


@triton.jit
def _load(at, columns, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Columns 0 .. WIDTH - 1 of rows that start at `at`, zeros beyond them; rows that are not `live` if MASKED."""
    if WIDTH == BLOCK:
        if MASKED:
            return tl.load(at[:, None] + columns[None, :], mask=live[:, None], other=0.0)
        return tl.load(at[:, None] + columns[None, :])
    inside = (columns < WIDTH)[None, :]
    if MASKED:
        inside = inside & live[:, None]
    return tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _attend(
    q, q_rope, expanded, rotated, begin, stop, ends, scale, acc, top, total,
    expanded_stride, rotated_stride, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds tokens begin .. stop - 1 to the state of each row; row i sees those before ends[i], checked if MASKED."""
    tokens = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, stop, BLOCK_N):
        live = start + tokens < stop
        far = tl.full([], 0, tl.int64) + start
        here = expanded + far * expanded_stride + tokens * expanded_stride
        k = _load(here, tl.arange(0, BLOCK_C), live, NOPE, BLOCK_C, MASKED)
        turned = rotated + far * rotated_stride + tokens * rotated_stride
        k_rope = _load(turned, tl.arange(0, BLOCK_R), live, ROPE, BLOCK_R, MASKED)
        v = _load(here + NOPE, tl.arange(0, BLOCK_V), live, V, BLOCK_V, MASKED)
        if PRECISION == "ieee":
            k, k_rope, v = k.to(tl.float32), k_rope.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rope.to(k.dtype), tl.trans(k_rope), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where((start + tokens)[None, :] < ends[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill(
    q, expanded, rotated, index, out, scale, q_row_stride, q_head_stride, rotated_stride, num_seqs,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles): late tiles see the most tokens and start first."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq, first_tile = sequence_of(index, COLUMNS, num_seqs, tile, BLOCK_M, AT_ONCE)
    index += seq * COLUMNS
    count = tl.load(index + 1)
    query_0 = (tile - first_tile) * BLOCK_M
    if query_0 >= count:
        return
    position_0 = tl.load(index + 2) + query_0
    rows = tl.arange(0, BLOCK_M)
    live = query_0 + rows < count
    row = (tl.load(index) + query_0 + rows).to(tl.int64)
    at = q + row * q_row_stride + head * q_head_stride
    tile_q = _load(at, tl.arange(0, BLOCK_C), live, NOPE, BLOCK_C, True)
    tile_rope = _load(at + NOPE, tl.arange(0, BLOCK_R), live, ROPE, BLOCK_R, True)

    token_0 = tl.load(index + 3).to(tl.int64)
    expanded_stride: tl.constexpr = HEADS * (NOPE + V)
    expanded += token_0 * expanded_stride + head * (NOPE + V)
    rotated += token_0 * rotated_stride
    ends = position_0 + rows + 1
    stop = position_0 + tl.minimum(BLOCK_M, count - query_0)
    whole = (position_0 + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Blocks that all rows see in full, then those that some see in part.
    acc, top, total = _attend(
        tile_q, tile_rope, expanded, rotated, 0, whole, ends, scale, acc, top, total, expanded_stride, rotated_stride,
        NOPE, ROPE, V, False, PRECISION, BLOCK_C, BLOCK_R, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend(
        tile_q, tile_rope, expanded, rotated, whole, stop, ends, scale, acc, top, total, expanded_stride,
        rotated_stride, NOPE, ROPE, V, True, PRECISION, BLOCK_C, BLOCK_R, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    share = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    v_columns = tl.arange(0, BLOCK_V)[None, :]
    to = out + (row * (HEADS * V) + head * V)[:, None] + v_columns
    tl.store(to, share.to(out.dtype.element_ty), mask=live[:, None] & (v_columns < V))


def choose_tiling(rows: int, seqs: int, heads: int) -> Tiling:
    """Tiles of 64 rows where those of 128 would leave multiprocessors idle. Bits of a row are the same in both."""
    return FEW_ROWS if (rows // 128 + seqs) * heads < 2 * 132 else Tiling()


def mla_prefill(
    q: torch.Tensor,
    expanded: torch.Tensor,
    rotated: torch.Tensor,
    index: torch.Tensor,
    scale: float,
    *,
    nope: int,
    tiling: Tiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, nope + rope], rotated, whose rows may be parts of wider ones; expanded [tokens, heads, nope + v]
    and rotated [tokens, rope] (may be part of wider rows): keys and values of all contexts; result [rows, heads * v].

    index int32 [sequences, 4], in the order of their rows, which follow each other without gaps: first row, number of
    rows, tokens of the context before the first row, and where the context starts in `expanded`. Row i of a sequence
    sees the tokens before it and its own.
    """
    (rows, heads, width), v = q.shape, expanded.shape[2] - nope
    rope = width - nope
    assert expanded.shape[1] == heads and expanded.is_contiguous() and rotated.shape == (len(expanded), rope)
    assert q.stride(2) == rotated.stride(1) == 1 and q.dtype == expanded.dtype == rotated.dtype and scale > 0
    assert index.dtype == torch.int32 and index.shape[1] == INDEX_COLUMNS and index.is_contiguous()
    if out is None:
        out = torch.empty(rows, heads * v, dtype=q.dtype, device=q.device)
    assert out.is_contiguous() and out.shape == (rows, heads * v)
    if rows == 0:
        return out
    cut = tiling or choose_tiling(rows, len(index), heads)
    _prefill[(heads, rows // cut.block_rows + len(index))](
        q, expanded, rotated, index, out, scale * LOG2E, q.stride(0), q.stride(1),
        rotated.stride(0), len(index), HEADS=heads, NOPE=nope, ROPE=rope, V=v, PRECISION=precision_of(q),
        BLOCK_M=cut.block_rows, BLOCK_C=_block(nope), BLOCK_R=_block(rope), BLOCK_V=_block(v),
        BLOCK_N=cut.block_tokens, COLUMNS=INDEX_COLUMNS, AT_ONCE=SEQUENCES_AT_ONCE,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
