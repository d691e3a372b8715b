"""Prologue of latent attention on CUDA, in two kernels around the query's up-projection.

`mla_prologue` takes the joint down-projection: it normalises the query part (and quantises it to 8 bits if the next
product takes that), normalises the latent, rotates the key and writes both into the paged cache, and rotates queries
that are ready before it, in models whose queries have no low rank. `rope_queries` rotates the rotary part of the
queries into its target. `cos_sin` is a table by position, complex, in the interleaved layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 to the nearest integer, ties to even."""


@triton.jit
def _rotate(even, odd, cos_sin, position, pairs, count):
    """Multiply element pairs, as complex numbers, by the rotation of their position."""
    at = cos_sin + (position * count + pairs) * 2
    cos = tl.load(at, mask=pairs < count, other=0.0)
    sin = tl.load(at + 1, mask=pairs < count, other=0.0)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _write(
    latent, cache, gain, cos_sin, position, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, KV_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row's normed latent and rotated key. (Names may not change their shape inside a branch.)"""
    columns = tl.arange(0, KV_BLOCK)
    inside = columns < RANK
    x = tl.load(latent + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(cache + columns, y.to(cache.dtype.element_ty), mask=inside)
    pairs = tl.arange(0, PAIR_BLOCK)
    is_pair = pairs < ROPE // 2
    even = tl.load(latent + RANK + 2 * pairs, mask=is_pair, other=0.0).to(tl.float32)
    odd = tl.load(latent + RANK + 2 * pairs + 1, mask=is_pair, other=0.0).to(tl.float32)
    even, odd = _rotate(even, odd, cos_sin, position, pairs, ROPE // 2)
    tl.store(cache + RANK + 2 * pairs, even.to(cache.dtype.element_ty), mask=is_pair)
    tl.store(cache + RANK + 2 * pairs + 1, odd.to(cache.dtype.element_ty), mask=is_pair)


@triton.jit
def _rotate_heads(
    q, out, cos_sin, position, head, heads, q_head_stride, out_head_stride,
    ROPE: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads and writes whole heads contiguously and splits them into pairs in between."""
    columns = tl.arange(0, ROPE_BLOCK)
    inside = head < heads
    if ROPE < ROPE_BLOCK:
        inside = inside & (columns < ROPE)[None, :]
    rotation = tl.load(cos_sin + position * ROPE + columns, mask=columns < ROPE, other=0.0)
    cos, sin = tl.split(tl.reshape(rotation, (1, ROPE_BLOCK // 2, 2)))
    x = tl.load(q + head * q_head_stride + columns[None, :], mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (HEAD_BLOCK, ROPE_BLOCK // 2, 2)))
    rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    y = tl.reshape(rotated, (HEAD_BLOCK, ROPE_BLOCK)).to(out.dtype.element_ty)
    tl.store(out + head * out_head_stride + columns[None, :], y, mask=inside)


@triton.jit
def _prologue(
    down, q_gain, kv_gain, cos_sin, positions, slot_mapping, cache, q_out, scales, q_rope, q_eps, kv_eps, down_stride,
    q_row_stride, q_head_stride, Q_RANK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, INT8: tl.constexpr,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    down += row * down_stride
    if Q_RANK > 0:
        columns = tl.arange(0, Q_BLOCK)
        inside = columns < Q_RANK
        x = tl.load(down + columns, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(q_gain + columns, mask=inside, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / Q_RANK + q_eps) * gain
        if INT8:
            largest = tl.maximum(tl.max(tl.abs(y), 0), 1e-30)
            steps = (y * (127.0 / largest) + ROUND) - ROUND
            tl.store(q_out + row * Q_RANK + columns, steps.to(tl.int8), mask=inside)
            tl.store(scales + row, largest / 127.0)
        else:
            tl.store(q_out + row * Q_RANK + columns, y.to(q_out.dtype.element_ty), mask=inside)
    position = tl.load(positions + row)
    if HEADS > 0:
        q_rope += row * q_row_stride
        head = tl.arange(0, HEAD_BLOCK)[:, None]
        _rotate_heads(
            q_rope, q_rope, cos_sin, position, head, HEADS, q_head_stride, q_head_stride,
            ROPE, HEAD_BLOCK, 2 * PAIR_BLOCK,
        )  # fmt: skip
    slot = tl.load(slot_mapping + row)
    if slot >= 0:  # padding rows have no slot
        target = cache + slot * (RANK + ROPE)
        _write(down + Q_RANK, target, kv_gain, cos_sin, position, kv_eps, RANK, ROPE, KV_BLOCK, PAIR_BLOCK)


@triton.jit
def _rope_queries(
    q, cos_sin, positions, out, heads, q_row_stride, q_head_stride, out_row_stride, out_head_stride,
    ROPE: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    _rotate_heads(
        q + row * q_row_stride, out + row * out_row_stride, cos_sin, tl.load(positions + row), head, heads,
        q_head_stride, out_head_stride, ROPE, HEAD_BLOCK, ROPE_BLOCK,
    )  # fmt: skip


def mla_prologue(
    down: torch.Tensor,
    q_gain: torch.Tensor | None,
    kv_gain: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_blocks: torch.Tensor,
    *,
    q_eps: float,
    kv_eps: float,
    int8: bool,
    q_rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """down [rows, q_rank + rank + rope]; cos_sin complex64 [positions, rope / 2]; positions, slot_mapping int64 [rows],
    slot -1: not written; kv_blocks [blocks, 64, rank + rope].

    Returns the normed query part [rows, q_rank], int8 or as `down`, and a float32 step per row (empty unless int8). A
    model without a query rank gives no q_gain: `down` then starts with the latent, and the result is empty; the rotary
    part of its queries, q_rope [rows, heads, rope], perhaps part of wider rows, is rotated in place if it is given.
    """
    rows, rank = len(down), len(kv_gain)
    q_rank, rope = (0 if q_gain is None else len(q_gain)), kv_blocks.shape[2] - rank
    assert down.shape[1] == q_rank + rank + rope and down.stride(1) == 1 and kv_blocks.is_contiguous()
    assert cos_sin.dtype == torch.complex64 and cos_sin.shape[1] * 2 == rope and cos_sin.is_contiguous()
    q_out = torch.empty(rows, q_rank, dtype=torch.int8 if int8 else down.dtype, device=down.device)
    scales = torch.empty(rows if int8 else 0, dtype=torch.float32, device=down.device)
    queries = down[:, None] if q_rope is None else q_rope
    heads = 0 if q_rope is None else q_rope.shape[1]
    assert q_rope is None or (q_rope.shape == (rows, heads, rope) and q_rope.stride(2) == 1)
    if rows > 0:
        _prologue[(rows,)](
            down, kv_gain if q_gain is None else q_gain, kv_gain, torch.view_as_real(cos_sin), positions, slot_mapping,
            kv_blocks, q_out, scales, queries, q_eps, kv_eps, down.stride(0), *queries.stride()[:2],
            Q_RANK=q_rank, RANK=rank, ROPE=rope, INT8=int8,
            HEADS=heads, HEAD_BLOCK=triton.next_power_of_2(max(1, heads)),
            Q_BLOCK=triton.next_power_of_2(max(1, q_rank)), KV_BLOCK=triton.next_power_of_2(rank),
            PAIR_BLOCK=triton.next_power_of_2(rope // 2), num_warps=4,
        )  # fmt: skip
    return q_out, scales


def rope_queries(q_rope: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """q_rope [rows, heads, rope], rotated into out of the same shape; both may be views of wider rows.

    Usually q_rope is the end of the projected queries and out the end of the absorbed ones.
    """
    rows, heads, rope = q_rope.shape
    assert out.shape == q_rope.shape and q_rope.stride(2) == out.stride(2) == 1
    assert cos_sin.dtype == torch.complex64 and cos_sin.shape[1] * 2 == rope and cos_sin.is_contiguous()
    head_block = min(64, triton.next_power_of_2(heads))
    if rows > 0:
        _rope_queries[(rows, triton.cdiv(heads, head_block))](
            q_rope, torch.view_as_real(cos_sin), positions, out, heads, *q_rope.stride()[:2], *out.stride()[:2],
            ROPE=rope, HEAD_BLOCK=head_block, ROPE_BLOCK=triton.next_power_of_2(rope), num_warps=4,
        )  # fmt: skip
