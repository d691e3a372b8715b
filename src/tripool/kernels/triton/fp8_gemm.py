"""e4m3 [rows, in] x e4m3 [out, in]^T -> bfloat16 [rows, out] on CUDA, scaled by blocks as DeepSeek stores them.

Scales as in `ref/fp8`: rows have one for each 128 columns, weights one for each 128 columns of up to 128 rows. Each 128
of depth are multiplied in e4m3 and added to a float32 sum with their scales. Weights are the tall side of the product,
as in `int8_gemm`. For few rows the depth is split until every multiprocessor has work: splits write partial sums and
the last program to arrive adds them in order, so the result does not depend on who arrives when.

The tiling depends on the number of rows; a row's result may depend on it in the last bits, never on other rows' values.
The tilings of `choose_invariant` split the depth by the weight's shape alone, and for many rows one program computes
the splits of its tile one after the other: a row's bits are then those of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tripool.kernels.ref.fp8 import E4M3, GROUP, rows_per_scale
from tripool.kernels.ref.w8a8 import Rows8
from tripool.kernels.triton.experts import scale_factors
from tripool.kernels.triton.int8_gemm import arrivals
from tripool.kernels.triton.tilings import NUM_SMS


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """Tokens and channels of a tile, and the number of splits of the depth; `band` as in `Narrow`."""

    block_m: int
    block_n: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5
    band: int = 0
    fold: bool = False
    """One program computes all splits of its tile."""


@cache
def choose_blocks(m: int, n: int, k: int) -> BlockTiling:
    """By shape alone."""
    if m > 512:
        return BlockTiling(128, 64, 1, 4, 4, band=8)
    if m > 128:
        tiles = triton.cdiv(m, 128) * triton.cdiv(n, 64)
        return BlockTiling(128, 64, max(1, min(2 * NUM_SMS // tiles, triton.cdiv(k, GROUP) // 12, 4)), 4, 4)
    block_m = 16
    while block_m < m:
        block_m *= 2
    tiles = triton.cdiv(n, 64)
    splits = max(1, min(2 * NUM_SMS // tiles, triton.cdiv(k, GROUP) // 4, 8))
    return BlockTiling(block_m, 64, splits, 4, 6 if block_m <= 64 else 5)


@cache
def choose_invariant(m: int, n: int, k: int) -> BlockTiling:
    """With splits that do not depend on the number of rows, and are long enough to be computed one after the other."""
    tiles = triton.cdiv(n, 64)
    splits = max(1, min(NUM_SMS // tiles, triton.cdiv(k, GROUP) // 8, 8))
    if m <= 128:
        return replace(choose_blocks(m, n, k), splits=splits)
    return BlockTiling(
        128, 64, splits, 4, 4, band=8 if m > 512 else 0, fold=splits > 1 and triton.cdiv(m, 128) * tiles >= NUM_SMS
    )


@triton.jit
def _split(
    x_desc, x_scale, w_desc, w_scale, m, n, rows, live, N, groups, split, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Channels x tokens of one split of the depth."""
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(split * groups // splits, (split + 1) * groups // splits):
        k = group * BLOCK_K
        by_row = tl.load(x_scale + rows * groups + group, mask=live, other=0.0)
        factors = scale_factors(w_scale, n * BLOCK_N, N, group, groups, by_row, BLOCK_N, SHARE, ONE)
        total += tl.dot(w_desc.load([n * BLOCK_N, k]), x_desc.load([m * BLOCK_M, k]).T) * factors
    return total


@triton.jit(do_not_specialize=["M", "splits"])
def block_gemm_kernel(
    x_desc, x_scale, w_desc, w_scale, out, parts, arrived, M, N, K, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, ONE: tl.constexpr,
    SPLIT: tl.constexpr, FOLD: tl.constexpr, BAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, blocks of channels, splits; one if FOLD)."""
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if BAND > 0:
        place, per_band = n * tl.num_programs(0) + m, BAND * tl.num_programs(1)
        above = place // per_band * BAND
        height = tl.minimum(tl.num_programs(0) - above, BAND)
        m, n = above + place % per_band % height, place % per_band // height
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    groups, rows = tl.cdiv(K, BLOCK_K), m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < M
    total = _split(
        x_desc, x_scale, w_desc, w_scale, m, n, rows, live, N, groups, split, splits, BLOCK_M, BLOCK_N, BLOCK_K,
        SHARE, ONE,
    )  # fmt: skip
    if FOLD:
        for s in range(1, splits):
            total += _split(
                x_desc, x_scale, w_desc, w_scale, m, n, rows, live, N, groups, s, splits, BLOCK_M, BLOCK_N, BLOCK_K,
                SHARE, ONE,
            )  # fmt: skip
    channels = n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + rows.to(tl.int64)[:, None] * N + channels[None, :]
    inside = live[:, None] & (channels < N)[None, :]
    if not SPLIT:
        tl.store(at, total.to(out.dtype.element_ty).T, mask=inside)
    else:
        tile = (m * tl.num_programs(1) + n).to(tl.int64)
        mine = parts + tile * splits * (BLOCK_M * BLOCK_N)
        places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(mine + split * (BLOCK_M * BLOCK_N) + places, total)
        tl.debug_barrier()  # all threads have written before one of them signals
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for s in range(splits):
                total += tl.load(mine + s * (BLOCK_M * BLOCK_N) + places, cache_modifier=".cg")
            tl.store(at, total.to(out.dtype.element_ty).T, mask=inside)
            tl.store(arrived + tile, 0)  # the next call counts from zero


def block_gemm(
    x: Rows8, w: Rows8, arrived: torch.Tensor | None = None, tiling: BlockTiling | None = None,
    out: torch.Tensor | None = None, *, choose: Callable[[int, int, int], BlockTiling] = choose_blocks,
) -> torch.Tensor:  # fmt: skip
    """Rows [m, k] and weights [n, k] with their scales -> bfloat16 [m, n]. k is a multiple of 16.

    `arrived` comes from `int8_gemm.arrivals`; without it split shapes zero their own counters.
    """
    (rows, x_scale), (weights, w_scale) = x, w
    (m, k), n, groups = rows.shape, len(weights), -(-rows.shape[1] // GROUP)
    assert weights.shape == (n, k) and k % 16 == 0 and rows.dtype == weights.dtype == E4M3
    assert x_scale.shape == (m, groups) and w_scale.shape[1] == groups
    assert all(one.is_contiguous() for one in (*x, *w))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=rows.device) if out is None else out
    if m == 0:
        return out
    t, share, early = tiling or choose(m, n, k), rows_per_scale(n, len(w_scale)), rows.is_cuda
    grid = triton.cdiv(m, t.block_m), triton.cdiv(n, t.block_n), 1 if t.fold else t.splits
    tiles, split = grid[0] * grid[1], grid[2] > 1
    parts = torch.empty(
        tiles * t.splits * t.block_m * t.block_n if split else 1, dtype=torch.float32, device=rows.device
    )
    if split and (arrived is None or len(arrived) < tiles):
        arrived = arrivals(rows.device, tiles)
    block_gemm_kernel[grid](
        TensorDescriptor.from_tensor(rows, [t.block_m, GROUP]), x_scale,
        TensorDescriptor.from_tensor(weights, [t.block_n, GROUP]), w_scale,
        out, parts, parts if arrived is None else arrived, m, n, k, t.splits,
        BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=GROUP, SHARE=share, ONE=share % t.block_n == 0, SPLIT=split,
        FOLD=t.fold, BAND=t.band, EARLY=early, num_warps=t.num_warps, num_stages=t.num_stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
