"""Paged latent attention for decoding on CUDA: absorbed form, one or a few query tokens per request, split over the KV.

Rows are a request's (query token, head) pairs, flattened. A program takes a block of rows and one part of the context;
a tile of the cache is loaded once and serves as keys (its whole width) and as values (its first `rank` columns). With
more than one split, each program writes a normalised partial result and its log-sum-exp, and a second kernel merges
them.

Two forms of the main kernel. Rows: rows x tokens, 64 rows per program, for many heads. Swapped: tokens x rows, so that
few rows (16 heads) are the narrow side of the product and padding costs little. A third, `mla_decode_hopper`, is for
one architecture and one shape. `bench/gpu/mla.py` times them all.

The number of splits follows from the batch, so the last bits of a result depend on it. With `split_tokens` splits have
a fixed length (it grows only where a context would need more than MAX_SPLITS of them), and the bits of a row with one
query depend on its own context only.

Nothing here depends on seq_lens on the host: the grid follows from shapes, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl

from tripool.kernels.triton import mla_decode_hopper

PAGE_TOKENS = 64
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiling of the main kernel; does not affect the result."""

    kind: Literal["rows", "swapped", "hopper"]
    block_rows: int = 64
    block_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 2


HOPPER = Tiling("hopper")
MANY_ROWS = Tiling("rows")
FEW_ROWS = Tiling("swapped", block_rows=16)
MAX_SPLITS = 32
INVARIANT_SPLIT_TOKENS = 256
"""`split_tokens` for batch-invariant results: short enough for one request, long enough for hundreds."""
SIZES = ["num_rows", "heads", "queries", "table_width", "splits"]
"""Compiled once for all values: batches come in many sizes, and none of these makes a load wider."""


@triton.jit
def _span(seq_lens, request, split, splits, BLOCK_N: tl.constexpr, FIXED: tl.constexpr, MAX: tl.constexpr):
    """(first, stop) token of this split, and the request's length. FIXED: tiles of a split; 0: as many as it takes."""
    length = tl.load(seq_lens + request)
    tiles = tl.cdiv(length, BLOCK_N)
    each = tl.cdiv(tiles, splits)
    if FIXED > 0:
        each = FIXED * tl.maximum(tl.cdiv(tiles, FIXED * MAX), 1)
    first = split * each * BLOCK_N
    return first, tl.minimum(first + each * BLOCK_N, length), length


@triton.jit
def _tile(
    kv, table_row, first, stop, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr
):
    """Cache rows of tokens [first, first + BLOCK_N); zeros from `stop` on, where memory may hold anything."""
    if BLOCK_N <= PAGE:  # within one page
        page = tl.load(table_row + first // PAGE).to(tl.int64)
        slots = page * PAGE + first % PAGE + tl.arange(0, BLOCK_N)
    else:
        tokens = first + tl.arange(0, BLOCK_N)
        page = tl.load(table_row + tokens // PAGE, mask=tokens < stop, other=0).to(tl.int64)
        slots = page * PAGE + tokens % PAGE
    rows = kv + slots[:, None] * (RANK + ROPE)
    live = (first + tl.arange(0, BLOCK_N) < stop)[:, None]
    latent = tl.load(rows + tl.arange(0, RANK)[None, :], mask=live, other=0.0)
    rope = tl.load(rows + (RANK + tl.arange(0, ROPE))[None, :], mask=live, other=0.0)
    return latent, rope


@triton.jit(do_not_specialize=SIZES)
def _decode_rows(
    q, kv, table, seq_lens, out, parts, sums, scale, num_rows, heads, queries, table_width, splits,
    WHOLE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FIXED: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    split, request = tl.program_id(1), tl.program_id(2)
    first, stop, length = _span(seq_lens, request, split, splits, BLOCK_N, FIXED, MAX)
    rows = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = rows < num_rows
    sees = length - queries + 1 + rows // heads  # causal mask
    at = (request.to(tl.int64) * num_rows + rows)[:, None]
    q_latent = tl.load(q + at * (RANK + ROPE) + tl.arange(0, RANK)[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q + at * (RANK + ROPE) + (RANK + tl.arange(0, ROPE))[None, :], mask=real[:, None], other=0.0)

    top = tl.full([BLOCK_H], -1e30, tl.float32)  # finite, so that a row without visible tokens does not become NaN
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, RANK], tl.float32)
    for start in tl.range(first, stop, BLOCK_N):
        latent, rope = _tile(kv, table + request * table_width, start, stop, RANK, ROPE, BLOCK_N, PAGE)
        scores = tl.dot(q_latent, tl.trans(latent))
        scores = tl.dot(q_rope, tl.trans(rope), scores) * scale
        tokens = start + tl.arange(0, BLOCK_N)
        seen = tokens[None, :] < tl.minimum(sees, stop)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None])
        top = new_top

    held = tl.where(total > 0, total, 1.0)
    share = acc * (1.0 / held)[:, None]
    columns = tl.arange(0, RANK)[None, :]
    if WHOLE:
        tl.store(out + at * RANK + columns, share.to(out.dtype.element_ty), mask=real[:, None])
    else:
        part = (request.to(tl.int64) * splits + split) * num_rows + rows
        tl.store(parts + part[:, None] * RANK + columns, share, mask=real[:, None] & (stop > first))
        tl.store(sums + part, tl.where(total > 0, top + tl.log2(held), float("-inf")), mask=real)


@triton.jit(do_not_specialize=SIZES)
def _decode_swapped(
    q, kv, table, seq_lens, out, parts, sums, scale, num_rows, heads, queries, table_width, splits,
    WHOLE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FIXED: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    split, request = tl.program_id(1), tl.program_id(2)
    first, stop, length = _span(seq_lens, request, split, splits, BLOCK_N, FIXED, MAX)
    rows = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = rows < num_rows
    sees = length - queries + 1 + rows // heads
    at = (request.to(tl.int64) * num_rows + rows)[None, :]
    q_latent = tl.load(q + at * (RANK + ROPE) + tl.arange(0, RANK)[:, None], mask=real[None, :], other=0.0)
    q_rope = tl.load(q + at * (RANK + ROPE) + (RANK + tl.arange(0, ROPE))[:, None], mask=real[None, :], other=0.0)

    top = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([RANK, BLOCK_H], tl.float32)
    for start in tl.range(first, stop, BLOCK_N):
        latent, rope = _tile(kv, table + request * table_width, start, stop, RANK, ROPE, BLOCK_N, PAGE)
        scores = tl.dot(latent, q_latent)
        scores = tl.dot(rope, q_rope, scores) * scale
        tokens = start + tl.arange(0, BLOCK_N)
        seen = tokens[:, None] < tl.minimum(sees, stop)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * fade[None, :])
        top = new_top

    held = tl.where(total > 0, total, 1.0)
    share = acc * (1.0 / held)[None, :]
    columns = tl.arange(0, RANK)[:, None]
    if WHOLE:
        tl.store(out + at * RANK + columns, share.to(out.dtype.element_ty), mask=real[None, :])
    else:
        part = (request.to(tl.int64) * splits + split) * num_rows + rows
        tl.store(parts + part[None, :] * RANK + columns, share, mask=real[None, :] & (stop > first))
        tl.store(sums + part, tl.where(total > 0, top + tl.log2(held), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _merge(parts, sums, out, num_rows, splits, RANK: tl.constexpr):
    """Merge the parts of one row of one request, weighted by their shares of the softmax."""
    row, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, RANK)
    top = tl.full([], -1e30, tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(sums + (request * splits + split) * num_rows + row))
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([RANK], tl.float32)
    for split in range(splits):
        part = (request * splits + split) * num_rows + row
        held = tl.load(sums + part)
        weight = tl.exp2(held - top)
        # An empty split wrote no part.
        acc += weight * tl.load(parts + part * RANK + columns, mask=held > float("-inf"), other=0.0)
        total += weight
    share = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (request * num_rows + row) * RANK + columns, share.to(out.dtype.element_ty))


def choose_splits(num_requests: int, row_blocks: int, max_tokens: int, num_units: int, block_tokens: int = 64) -> int:
    """Number of splits that keeps all multiprocessors busy: the fewest whose last wave is nearly full.

    Based on the largest length that a batch may have: actual lengths are on the device.
    """
    tiles = max(1, -(-max_tokens // block_tokens))
    best, best_time = 1, float("inf")
    for splits in range(1, min(MAX_SPLITS, tiles) + 1):
        waves = -(-num_requests * row_blocks * splits // num_units)
        # Tiles per multiprocessor; starting and ending a program costs about two more, merging about three.
        time = waves * (-(-tiles // splits) + 2) + (3 if splits > 1 else 0)
        if time < best_time * 0.98:
            best, best_time = splits, time
    return best


def choose_tiling(q_latent: torch.Tensor, rank: int) -> Tiling:
    """The Hopper kernel where it can run; elsewhere by the number of rows."""
    num_rows = q_latent.shape[1] * q_latent.shape[2]
    if q_latent.is_cuda and q_latent.dtype == torch.bfloat16 and (rank, q_latent.shape[3]) == (512, 576):  # noqa: SIM102
        if torch.cuda.get_device_capability(q_latent.device) == (9, 0):
            return HOPPER
    if num_rows > 32:
        return MANY_ROWS
    return FEW_ROWS if num_rows <= 16 else replace(FEW_ROWS, block_rows=32)


def mla_decode(
    q_latent: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    rank: int = 512,
    max_tokens: int | None = None,
    splits: int | None = None,
    split_tokens: int | None = None,
    tiling: Tiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q_latent [B, Q, H, rank + rope], absorbed and rotated; kv_blocks [blocks, 64, rank + rope], holding the query
    tokens too; block_table int32 [B, width]; seq_lens int32 [B], query tokens included; result [B, Q, H, rank].

    Query token i of Q sees `seq_lens - Q + 1 + i` tokens; one that sees none (padding: length 0) gets zeros. Entries of
    the table beyond a length are never used. `max_tokens`: upper bound of the lengths (default: the table's width).
    `split_tokens`: see above; a multiple of a tile.
    """
    batch, queries, heads, width = q_latent.shape
    num_rows = queries * heads
    assert kv_blocks.shape[1:] == (PAGE_TOKENS, width) and q_latent.is_contiguous() and kv_blocks.is_contiguous()
    assert block_table.stride(1) == 1 and seq_lens.shape == (batch,) and block_table.shape[0] == batch
    assert block_table.dtype == seq_lens.dtype == torch.int32 and kv_blocks.dtype == q_latent.dtype
    cut = tiling or choose_tiling(q_latent, rank)
    row_blocks = triton.cdiv(num_rows, cut.block_rows)
    most, fixed = max_tokens or block_table.shape[1] * PAGE_TOKENS, (split_tokens or 0) // cut.block_tokens
    if split_tokens is not None:
        assert splits is None and split_tokens == fixed * cut.block_tokens
        splits = min(MAX_SPLITS, triton.cdiv(most, split_tokens))
    elif splits is None:
        splits = choose_splits(batch, row_blocks, most, num_units(q_latent.device), cut.block_tokens)
    if out is None:
        out = torch.empty(batch, queries, heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    if batch == 0:
        return out
    parts = torch.empty(batch, splits, num_rows, rank if splits > 1 else 0, dtype=torch.float32, device=out.device)
    sums = torch.empty(batch, splits, num_rows, dtype=torch.float32, device=out.device)
    scale_log2 = scale * LOG2E
    if cut.kind == "hopper":
        mla_decode_hopper.launch(
            q_latent, kv_blocks, block_table, seq_lens, scale_log2, out, parts, sums, splits, fixed, MAX_SPLITS
        )
    else:
        (_decode_swapped if cut.kind == "swapped" else _decode_rows)[(row_blocks, splits, batch)](
            q_latent, kv_blocks, block_table, seq_lens, out, parts, sums, scale_log2,
            num_rows, heads, queries, block_table.stride(0), splits, WHOLE=splits == 1, RANK=rank, ROPE=width - rank,
            BLOCK_H=cut.block_rows, BLOCK_N=cut.block_tokens, PAGE=PAGE_TOKENS, FIXED=fixed, MAX=MAX_SPLITS,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    if splits > 1:
        _merge[(num_rows, batch)](parts, sums, out, num_rows, splits, RANK=rank, num_warps=4)
    return out


def num_units(device: torch.device) -> int:
    """Number of multiprocessors; a typical number under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
