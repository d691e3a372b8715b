"""Steps between the qkv product and grouped-query attention on CUDA, in one kernel.

Normalises each head of q and k (if the model does), rotates them, and writes k and v into the paged cache; q is changed
in place. Arithmetic is float32 and rounds once. Pairs of a rotation are neighbours (the interleaved layout).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tripool.kernels.weights import Norm

HEADS_AT_ONCE = 8


@triton.jit
def _rope_cache(
    qkv, q_gain, k_gain, cos_sin, slot_mapping, kv, q_eps, k_eps, row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    inside = (heads < HEADS + 2 * KV_HEADS)[:, None] & (columns < DIM)[None, :]
    at = qkv + row * row_stride + heads[:, None] * DIM + columns[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = x
    is_query = (heads < HEADS)[:, None]
    if NORM:
        for_q = tl.load(q_gain + columns, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
        for_k = tl.load(k_gain + columns, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
        mean = tl.sum(x * x, 1) / DIM
        y = x * tl.rsqrt(mean + tl.where(heads < HEADS, q_eps, k_eps))[:, None] * tl.where(is_query, for_q, for_k)
    rotation = tl.load(cos_sin + row * DIM + columns, mask=columns < DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(rotation, (1, BLOCK_D // 2, 2)))
    even, odd = tl.split(tl.reshape(y, (BLOCK_H, BLOCK_D // 2, 2)))
    rotated = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK_H, BLOCK_D))
    y = tl.where((heads < HEADS + KV_HEADS)[:, None], rotated, x).to(kv.dtype.element_ty)
    tl.store(at, y, mask=inside & is_query)
    slot = tl.load(slot_mapping + row)
    target = kv + slot * (2 * KV_HEADS * DIM) + (heads - HEADS)[:, None] * DIM + columns[None, :]
    tl.store(target, y, mask=inside & (heads >= HEADS)[:, None] & (slot >= 0))


def rope_cache(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> torch.Tensor:
    """qkv [rows, (heads + 2 * kv_heads) * dim], of which q is rotated in place; cos_sin complex64 [rows, dim / 2], the
    rotation of each row's position; slot_mapping int64 [rows], -1: not written; kv [slots, 2 * kv_heads * dim];
    norms with gains [dim], both or none. Returns q as a view [rows, heads, dim].
    """
    rows, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    assert qkv.stride(1) == 1 and kv.is_contiguous() and kv.shape[1] == 2 * kv_heads * dim and kv.dtype == qkv.dtype
    assert cos_sin.dtype == torch.complex64 and cos_sin.shape == (rows, dim // 2) and cos_sin.is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    if rows > 0:
        q_part, k_part = q_norm or Norm(kv, 0.0), k_norm or Norm(kv, 0.0)
        _rope_cache[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
            qkv, q_part.gain, k_part.gain, torch.view_as_real(cos_sin), slot_mapping, kv, q_part.eps, k_part.eps,
            qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, NORM=q_norm is not None,
            BLOCK_H=HEADS_AT_ONCE, BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
    return qkv[:, : heads * dim].unflatten(1, (heads, dim))
