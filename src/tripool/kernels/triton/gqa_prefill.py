"""Paged grouped-query attention for prompt rows on CUDA: all sequences of a step in one launch.

Sequences differ in start, count and blocks; K and V come from pages, so that chunks of a prompt and prefix hits need
nothing special. A tile is some query tokens of one sequence times the heads that share a KV head. Tiles need no list:
program i finds its sequence by counting those whose first tile is not beyond i, where each sequence has one tile more
than its share of all rows; the spare ones end at once. Late tiles see the most tokens and start first.

Each row adds its tokens in blocks counted from position 0, so its bits do not depend on how a prompt was cut into
chunks, nor on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tripool.kernels.triton.paged_attention import LOG2E, PAGE_TOKENS, attend_pages, precision_of

INDEX_COLUMNS = 4
"""Columns of the index before the blocks: first row, number of rows, position of the first row, first visible one."""
SEQUENCES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Tiling:
    block_rows: int = 128
    block_tokens: int = PAGE_TOKENS
    num_warps: int = 8
    num_stages: int = 5


FEW_ROWS = Tiling(block_rows=64, num_warps=4, num_stages=3)
WIDE_HEADS = Tiling(block_tokens=32, num_stages=3)
"""More tokens at once would not fit the registers."""


@triton.jit
def sequence_of(index, index_stride, num_seqs, tile, TILE_QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sequence of a tile and the number of its first tile."""
    found = 0
    for begin in tl.range(0, num_seqs, AT_ONCE):
        seqs = begin + tl.arange(0, AT_ONCE)
        row = tl.load(index + seqs * index_stride, mask=seqs < num_seqs, other=0)
        found += tl.sum(((row // TILE_QUERIES + seqs <= tile) & (seqs < num_seqs)).to(tl.int32), 0)
    seq = found - 1
    return seq, tl.load(index + seq * index_stride) // TILE_QUERIES + seq


@triton.jit(do_not_specialize=["index_stride", "num_seqs", "window"])
def _prefill(
    q, kv, index, out, scale, q_stride, index_stride, num_seqs, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile_queries: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq, first_tile = sequence_of(index, index_stride, num_seqs, tile, tile_queries, AT_ONCE)
    index += seq * index_stride
    count = tl.load(index + 1)
    query_0 = (tile - first_tile) * tile_queries
    if query_0 >= count:
        return
    position_0 = tl.load(index + 2) + query_0
    rows = tl.arange(0, BLOCK_M)
    query = query_0 + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    ends = position_0 + rows // GROUP + 1
    stop = position_0 + tl.minimum(tile_queries, count - query_0)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = ((rows < tile_queries * GROUP) & (query < count))[:, None] & (columns < DIM)
    row = (tl.load(index) + query).to(tl.int64)
    tile_q = tl.load(q + (row * q_stride + head * DIM)[:, None] + columns, mask=inside, other=0.0)

    table_row, head_kv = index + COLUMNS, kv + kv_head * DIM
    begin = 0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lows = ends
    if LOW:
        first = tl.load(index + 3)
        lows = tl.maximum(ends - window, first)
        begin = tl.maximum(position_0 + 1 - window, first) // BLOCK_N * BLOCK_N
    # Blocks that all rows see in full, then those that some see in part.
    whole = tl.maximum((position_0 + 1) // BLOCK_N * BLOCK_N, begin)
    acc, top, total = attend_pages(
        tile_q, head_kv, table_row, begin, whole, lows, ends, scale, acc, top, total,
        2 * KV_HEADS * DIM, DIM, False, LOW, PRECISION, BLOCK_D, BLOCK_N, PAGE,
    )  # fmt: skip
    acc, top, total = attend_pages(
        tile_q, head_kv, table_row, whole, stop, lows, ends, scale, acc, top, total,
        2 * KV_HEADS * DIM, DIM, True, LOW, PRECISION, BLOCK_D, BLOCK_N, PAGE,
    )  # fmt: skip
    share = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    at = row * (KV_HEADS * GROUP * DIM) + head * DIM
    tl.store(out + at[:, None] + columns, share.to(out.dtype.element_ty), mask=inside)


def choose_tiling(rows: int, seqs: int, heads: int, kv_heads: int, dim: int) -> Tiling:
    """Tiles of 64 rows where those of 128 would leave multiprocessors idle. Bits of a row are the same in both."""
    group = heads // kv_heads
    if dim > 128:
        return WIDE_HEADS
    tiles = (rows // (128 // group) + seqs) * kv_heads
    return FEW_ROWS if tiles < 2 * 132 and group <= FEW_ROWS.block_rows else Tiling()


def gqa_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    index: torch.Tensor,
    scale: float,
    *,
    low: bool = False,
    window: int | None = None,
    tiling: Tiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, dim], whose rows may be parts of wider ones; kv [slots, 2 * kv_heads * dim], holding the rows'
    own tokens too; result [rows, heads * dim].

    index int32 [sequences, 4 + width], in the order of their rows, which follow each other without gaps: first row,
    number of rows, position of the first row, first visible position (0 unless `low`), then the sequence's blocks.
    A row at position p sees positions max(first, p - window + 1) .. p; one that sees none gets zeros.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[1] // (2 * dim)
    group = heads // kv_heads
    assert kv.shape[1] == 2 * kv_heads * dim and heads == group * kv_heads and scale > 0
    assert group <= 128, "heads of one KV head are the rows of one tile"
    assert q.stride(2) == 1 and q.stride(1) == dim and kv.is_contiguous() and kv.dtype == q.dtype
    assert index.dtype == torch.int32 and index.stride(1) == 1
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    assert out.is_contiguous() and out.shape == (rows, heads * dim)
    if rows == 0:
        return out
    cut = tiling or choose_tiling(rows, len(index), heads, kv_heads, dim)
    tiles = rows // (cut.block_rows // group) + len(index)
    _prefill[(kv_heads, tiles)](
        q, kv, index, out, scale * LOG2E, q.stride(0), index.stride(0), len(index),
        2**30 if window is None else window, GROUP=group, KV_HEADS=kv_heads, DIM=dim, LOW=low or window is not None,
        PRECISION=precision_of(q), BLOCK_M=cut.block_rows, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_N=cut.block_tokens, PAGE=PAGE_TOKENS, COLUMNS=INDEX_COLUMNS, AT_ONCE=SEQUENCES_AT_ONCE,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
