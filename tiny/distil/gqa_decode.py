"""One decode step of grouped attention over rows of their own lengths: turn and store, then attend.

Caches lie as [rows, kv_heads, places, dim], one row's keys of one head in one piece: a step is a stream through them.
The plain versions are in `plain.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def turn_and_store_kernel(
    qkv, cosines, sines, slot_mapping, keys, values, stride_row, num_places,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """A program for each row: all its heads at once. Element i turns with i + DIM / 2."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + row).to(tl.int64)
    head, half = tl.arange(0, PAD)[:, None], tl.arange(0, DIM // 2)[None, :]
    here = qkv + row * stride_row + head * DIM + half
    real = head < HEADS + 2 * KV_HEADS
    first, second = tl.load(here, mask=real, other=0.0), tl.load(here + DIM // 2, mask=real, other=0.0)
    cosine = tl.load(cosines + place * (DIM // 2) + half)
    sine = tl.load(sines + place * (DIM // 2) + half)
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_a, turned_b = a * cosine - b * sine, b * cosine + a * sine
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    tl.store(here, turned_a.to(first.dtype), mask=is_query)
    tl.store(here + DIM // 2, turned_b.to(first.dtype), mask=is_query)
    into_keys = keys + ((row * KV_HEADS + head - HEADS) * num_places + place) * DIM + half
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(into_keys, turned_a.to(first.dtype), mask=is_key)
    tl.store(into_keys + DIM // 2, turned_b.to(first.dtype), mask=is_key)
    into_values = values + ((row * KV_HEADS + head - HEADS - KV_HEADS) * num_places + place) * DIM + half
    tl.store(into_values, first, mask=is_value & real)
    tl.store(into_values + DIM // 2, second, mask=is_value & real)


@triton.jit
def attend_kernel(
    qkv, keys, values, out, counts, stride_row, num_places, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row and key head; the queries that share it are padded to the tensor cores' 16 lines."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(counts + row)
    line, dim, step = tl.arange(0, PAD), tl.arange(0, DIM), tl.arange(0, BLOCK)
    wanted = (line < GROUP)[:, None]
    q_at = (kv_head * GROUP + line)[:, None] * DIM + dim[None, :]
    q = tl.load(qkv + row * stride_row + q_at, mask=wanted, other=0.0)
    base = (row * KV_HEADS + kv_head) * num_places * DIM
    best = tl.full((PAD,), -1e30, dtype=tl.float32)
    total = tl.zeros((PAD,), dtype=tl.float32)
    acc = tl.zeros((PAD, DIM), dtype=tl.float32)
    for first in range(0, count, BLOCK):
        place = first + step
        inside = place < count
        at = base + place[:, None] * DIM + dim[None, :]
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        best = new_best
    result = acc / tl.maximum(total, 1e-20)[:, None]
    tl.store(out + row * HEADS * DIM + q_at, result.to(q.dtype), mask=wanted)


def turn_and_store(
    qkv: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], slot_mapping: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor,
) -> None:  # fmt: skip
    """qkv [rows, (heads + 2 kv_heads) · dim]: queries are turned in place, keys and values go to `slot_mapping` [rows].

    `turn`: cosines and sines, float32 [places, dim / 2].
    """
    rows, kv_heads, num_places, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    assert qkv.stride(1) == 1 and keys.is_contiguous() and values.is_contiguous()
    turn_and_store_kernel[(rows,)](
        qkv, turn[0], turn[1], slot_mapping, keys, values, qkv.stride(0), num_places,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAD=triton.next_power_of_2(heads + 2 * kv_heads), num_warps=4,
    )  # fmt: skip


def attend(qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Turned queries over the first `counts` [rows] places of each row -> [rows, heads · dim]; a row of none gets 0."""
    rows, kv_heads, num_places, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group = heads // kv_heads
    out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
    attend_kernel[(rows, kv_heads)](
        qkv, keys, values, out, counts, qkv.stride(0), num_places, dim**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GROUP=group, PAD=max(16, triton.next_power_of_2(group)), BLOCK=64,
        num_warps=2, num_stages=2,
    )  # fmt: skip
    return out
