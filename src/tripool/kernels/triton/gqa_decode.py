"""Paged grouped-query attention for decoding on CUDA: one or two query tokens per request, split over the KV.

A program takes one KV head and one split of a request's context; the heads that share the KV head, times the query
tokens, are the rows of its tile (padded to 16). Splits have a fixed length (it grows only where a context would need
more than MAX_SPLITS of them), so the bits of a row depend on its own length only, not on the batch. A request of one
split writes its result; others write normalised partial results, which a second kernel merges in the order of the
splits. At lengths that cross a multiple of MAX_SPLITS * SPLIT_TOKENS the splits of two queries are those of the second.

Nothing depends on seq_lens on the host: the grid follows from shapes, programs beyond a length end at once, so a call
can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tripool.kernels.triton.paged_attention import LOG2E, PAGE_TOKENS, attend_pages, precision_of

SPLIT_TOKENS = 256
MAX_SPLITS = 32
MERGE_AT_ONCE = 8
"""Splits that the merge loads together; their sums are added in this grouping for any number of splits."""
MAX_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """`split_tokens` and `block_tokens` decide the order of the sums, so they never depend on the batch.

    A page's number is a load before its K and V: the compiler gives both a stage, so that 3 and 4 stages hold one tile
    of K and V in advance, 5 and 6 two.
    """

    split_tokens: int = SPLIT_TOKENS
    block_tokens: int = PAGE_TOKENS
    num_warps: int = 4
    num_stages: int = 5


@triton.jit
def _context(seq_lens, request, table_width, SPLIT: tl.constexpr, MAX: tl.constexpr, PAGE: tl.constexpr):
    """A request's length, how many tokens of it have blocks (padding queries may lie beyond), and tokens per split."""
    length = tl.load(seq_lens + request)
    tokens = tl.minimum(length, table_width * PAGE)
    return length, tokens, SPLIT * tl.maximum(tl.cdiv(tokens, SPLIT * MAX), 1)


@triton.jit(do_not_specialize=["table_stride", "table_width", "splits", "first", "window"])
def _decode(
    q, kv, table, seq_lens, out, parts, sums, scale, q_stride, table_stride, table_width, splits, first, window,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, MAX: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    kv_head, split, request = tl.program_id(0) % KV_HEADS, tl.program_id(1), tl.program_id(2)
    length, tokens, each = _context(seq_lens, request, table_width, SPLIT, MAX, PAGE)
    begin = split * each
    if (begin >= tokens) & (split > 0):
        return
    stop = tl.minimum(begin + each, tokens)
    rows = tl.program_id(0) // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    ends = length - QUERIES + 1 + query
    lows = tl.maximum(ends - window, first)
    start = begin
    if LOW:
        lowest = tl.maximum(length - QUERIES + 1 - window, first)
        start = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < QUERIES * GROUP)[:, None] & (columns < DIM)
    at = (request.to(tl.int64) * QUERIES + query) * q_stride + head * DIM
    tile = tl.load(q + at[:, None] + columns, mask=inside, other=0.0)
    # top is finite, so that a row without visible tokens does not become NaN.
    acc, top, total = attend_pages(
        tile, kv + kv_head * DIM, table + request.to(tl.int64) * table_stride, start, stop, lows, ends, scale,
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], -1e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32), 2 * KV_HEADS * DIM, DIM, True, LOW, PRECISION, BLOCK_D, BLOCK_N, PAGE,
    )  # fmt: skip
    held = tl.where(total > 0, total, 1.0)
    share = acc * (1.0 / held)[:, None]
    row = query * (KV_HEADS * GROUP) + head
    num_rows: tl.constexpr = QUERIES * KV_HEADS * GROUP
    if tokens <= each:
        out += request.to(tl.int64) * (num_rows * DIM)
        tl.store(out + row[:, None] * DIM + columns, share.to(out.dtype.element_ty), mask=inside)
    else:
        part = (request.to(tl.int64) * splits + split) * num_rows + row
        tl.store(parts + part[:, None] * DIM + columns, share, mask=inside)
        sums_held = tl.where(total > 0, top + tl.log2(held), float("-inf"))
        tl.store(sums + part, sums_held, mask=rows < QUERIES * GROUP)


@triton.jit(do_not_specialize=["table_width", "splits"])
def _merge(
    parts, sums, seq_lens, out, num_rows, table_width, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, MAX: tl.constexpr, AT_ONCE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one row of one request, weighted by their shares of the softmax."""
    row, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, tokens, each = _context(seq_lens, request, table_width, SPLIT, MAX, PAGE)
    used = tl.cdiv(tokens, each)
    if used <= 1:
        return
    every = tl.arange(0, MAX)
    sums += request * splits * num_rows + row
    parts += (request * splits * num_rows + row) * DIM
    held = tl.load(sums + every * num_rows, mask=every < used, other=float("-inf"))
    top = tl.maximum(tl.max(held, 0), -1e30)
    total = tl.sum(tl.exp2(held - top), 0)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in tl.range(0, used, AT_ONCE):
        some = begin + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(sums + some * num_rows, mask=some < used, other=float("-inf")) - top)
        at = parts + (some * num_rows)[:, None] * DIM + columns[None, :]
        part = tl.load(at, mask=(some < used)[:, None] & (columns < DIM)[None, :], other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    share = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (request * num_rows + row) * DIM + columns, share.to(out.dtype.element_ty), mask=columns < DIM)


def choose_tiling(dim: int) -> Tiling:
    """A function of the model's shape alone: see `Tiling`."""
    return Tiling(block_tokens=32) if dim > 128 else Tiling()


def gqa_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    queries: int = 1,
    first: int = 0,
    window: int | None = None,
    tiling: Tiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [requests * queries, heads, dim], whose rows may be parts of wider ones; kv [slots, 2 * kv_heads * dim],
    holding the query tokens too; block_table int32 [requests, width]; seq_lens int32 [requests], query tokens included;
    result [requests * queries, heads * dim].

    Query i of Q stands at position p = seq_lens - Q + i and sees positions max(first, p - window + 1) .. p; one that
    sees none (padding: length 0) gets zeros. Entries of the table beyond a length are never used; tokens beyond the
    table (a length may count padding queries) are not seen.
    """
    rows, heads, dim = q.shape
    batch, width = block_table.shape
    kv_heads = kv.shape[1] // (2 * dim)
    group = heads // kv_heads
    assert rows == batch * queries and kv.shape[1] == 2 * kv_heads * dim and heads == group * kv_heads
    assert q.stride(2) == 1 and q.stride(1) == dim and kv.is_contiguous() and kv.dtype == q.dtype and scale > 0
    assert block_table.dtype == seq_lens.dtype == torch.int32 and block_table.stride(1) == 1
    cut = tiling or choose_tiling(dim)
    assert cut.split_tokens % cut.block_tokens == 0 and PAGE_TOKENS % cut.block_tokens == 0
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    assert out.is_contiguous() and out.shape == (rows, heads * dim)
    if batch == 0:
        return out
    splits = min(MAX_SPLITS, triton.cdiv(width * PAGE_TOKENS, cut.split_tokens))
    kept = splits if splits > 1 else 0
    parts = torch.empty(batch, kept, queries * heads, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch, kept, queries * heads, dtype=torch.float32, device=q.device)
    block_rows = min(MAX_BLOCK_ROWS, max(16, triton.next_power_of_2(queries * group)))
    block_d = max(16, triton.next_power_of_2(dim))
    _decode[(kv_heads * triton.cdiv(queries * group, block_rows), splits, batch)](
        q, kv, block_table, seq_lens, out, parts, sums, scale * LOG2E, q.stride(0), block_table.stride(0), width,
        splits, first, 2**30 if window is None else window, QUERIES=queries, GROUP=group, KV_HEADS=kv_heads, DIM=dim,
        LOW=first > 0 or window is not None, PRECISION=precision_of(q), BLOCK_M=block_rows, BLOCK_D=block_d,
        BLOCK_N=cut.block_tokens, SPLIT=cut.split_tokens, MAX=MAX_SPLITS, PAGE=PAGE_TOKENS,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(queries * heads, batch)](
            parts, sums, seq_lens, out, queries * heads, width, splits, DIM=dim, BLOCK_D=block_d,
            SPLIT=cut.split_tokens, MAX=MAX_SPLITS, AT_ONCE=MERGE_AT_ONCE, PAGE=PAGE_TOKENS, num_warps=4,
        )  # fmt: skip
    return out
