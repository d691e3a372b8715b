"""The loop that both grouped-query kernels share: online softmax over tokens of one KV head, read from pages in place.

A KV row is [K of all heads | V of all heads]; a page is 64 consecutive rows. Rows of a tile are (query token, head)
pairs of the heads that share the KV head, so that a page is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 64
LOG2E = 1.4426950408889634


@triton.jit
def load_tile(kv, table_row, start, stop, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """K and V of tokens [start, start + BLOCK_N); zeros from `stop` on if MASKED, where memory may hold anything."""
    tokens = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)[None, :]
    if BLOCK_N <= PAGE:  # within one page: the tile's offsets are 32 bits wide and do not change
        page = tl.load(table_row + start // PAGE).to(tl.int64)
        kv += page * (PAGE * WIDTH) + (start % PAGE) * WIDTH
        at = kv + (tokens[:, None] * WIDTH + columns)
    else:
        page = tl.load(table_row + (start + tokens) // PAGE, mask=start + tokens < stop, other=0).to(tl.int64)
        at = kv + (page * (PAGE * WIDTH) + (tokens % PAGE) * WIDTH)[:, None] + columns
    values = at + WIDTH // 2
    if DIM == BLOCK_D:
        if MASKED:
            live = (start + tokens < stop)[:, None]
            return tl.load(at, mask=live, other=0.0), tl.load(values, mask=live, other=0.0)
        return tl.load(at), tl.load(values)
    inside = columns < DIM
    if MASKED:
        inside = inside & (start + tokens < stop)[:, None]
    return tl.load(at, mask=inside, other=0.0), tl.load(values, mask=inside, other=0.0)


@triton.jit
def attend_pages(
    q, kv, table_row, begin, stop, lows, ends, scale, acc, top, total,
    WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Adds tokens begin .. stop - 1 (`begin` is a multiple of BLOCK_N) to the state (acc, top, total) of each row.

    Row i sees tokens lows[i] .. ends[i] - 1; the upper bound is checked if MASKED, the lower one if LOW. `scale` is
    positive and in units of log2. `kv` points to the head's K in row 0.
    """
    for start in tl.range(begin, stop, BLOCK_N):
        k, v = load_tile(kv, table_row, start, stop, WIDTH, DIM, MASKED, BLOCK_D, BLOCK_N, PAGE)
        if PRECISION == "ieee":
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision=PRECISION)
        tokens = (start + tl.arange(0, BLOCK_N))[None, :]
        if MASKED:
            scores = tl.where(tokens < ends[:, None], scores, float("-inf"))
        if LOW:
            scores = tl.where(tokens >= lows[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


def precision_of(q: torch.Tensor) -> str:
    """Tests only: products of float32 are not rounded to tf32, and those of 16 bits are made in float32 under the
    interpreter, which has no bfloat16."""
    return "ieee" if q.dtype == torch.float32 or not q.is_cuda else "tf32"
