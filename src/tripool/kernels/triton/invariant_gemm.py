"""Batch-invariant products in 16 bits on CUDA: a row's bits depend neither on the number of rows nor on its place.

`invariant_gemm` cuts the depth into pieces by the weight's shape alone; a result is the sum of its pieces in order. For
few rows each piece has its own program, and the last one to arrive adds them; for many rows one program computes the
pieces of its tile one after the other. `invariant_bmm` is one product per head, of one piece.

Within a piece, sums are float32 in steps of BLOCK_K. Weights are the tall side of a tile in multiples of 64 channels,
so that every tile uses the same matrix instruction, `wgmma`, which takes 64 channels, the same depth and any number of
rows; `bench/gpu/exact.py` compares the bits of all tilings on the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tripool.kernels.triton.int8_gemm import arrivals
from tripool.kernels.triton.tilings import NUM_SMS

BLOCK_K = 64
PIECE_DEPTH = 1024
"""Least depth of a piece: shorter ones spend their time filling the pipeline."""
WIDTH_MULTIPLE = 8
"""Of the depth: rows start at 16 bytes, as tensor descriptors need."""


@dataclass(frozen=True, slots=True)
class InvariantTiling:
    """Rows and channels of a tile. `split`: pieces have programs of their own. `band` as in `tilings.Narrow`. Decides
    nothing about the bits."""

    block_m: int
    block_n: int = 64
    split: bool = True
    num_warps: int = 4
    num_stages: int = 8
    band: int = 0


def num_pieces(n: int, k: int) -> int:
    """Pieces of the depth of a weight [n, k]: as many as give every multiprocessor a tile of few rows."""
    return max(1, min(NUM_SMS // triton.cdiv(n, 64), k // PIECE_DEPTH, 8))


@cache
def choose_invariant(m: int, n: int, k: int) -> InvariantTiling:
    if m <= 128:
        block_m, num_stages = (16, 8) if m <= 16 else (64, 6) if m <= 64 else (128, 4)
        return InvariantTiling(block_m, num_stages=num_stages)
    heights = triton.cdiv(m, 128)
    if heights * triton.cdiv(n, 128) >= 2 * NUM_SMS:
        return InvariantTiling(128, 128, split=False, num_warps=8, num_stages=5, band=8)
    return InvariantTiling(128, split=heights * triton.cdiv(n, 64) < NUM_SMS, num_stages=4)


@triton.jit
def _piece(
    x_desc, w_desc, m, n, piece, pieces, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels x rows of one piece of the depth."""
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(piece * steps // pieces, (piece + 1) * steps // pieces):
        w = w_desc.load([n * BLOCK_N, step * BLOCK_K])
        x = x_desc.load([m * BLOCK_M, step * BLOCK_K])
        total = tl.dot(w, x.T, total, input_precision=PRECISION)
    return total


@triton.jit
def _finish(total, out, bias, rows, channels, M, N, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Channels x rows of sums are written as rows x channels, with the bias, onto what is there if ADD."""
    at = out + rows.to(tl.int64)[None, :] * N + channels[:, None]
    inside = (rows < M)[None, :] & (channels < N)[:, None]
    if BIAS:
        total += tl.load(bias + channels, mask=channels < N, other=0.0).to(tl.float32)[:, None]
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "pieces"])
def product_kernel(
    x_desc, w_desc, out, bias, parts, arrived, M, N, K, pieces,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, BAND: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of channels, pieces if SPLIT)."""
    m, n = tl.program_id(0), tl.program_id(1)
    if BAND > 0:
        place, per_band = n * tl.num_programs(0) + m, BAND * tl.num_programs(1)
        above = place // per_band * BAND
        height = tl.minimum(tl.num_programs(0) - above, BAND)
        m, n = above + place % per_band % height, place % per_band // height
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    steps = tl.cdiv(K, BLOCK_K)
    rows, channels = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLIT:
        piece = tl.program_id(2)
        part = _piece(x_desc, w_desc, m, n, piece, pieces, steps, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        tile = (m * tl.num_programs(1) + n).to(tl.int64)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = parts + tile * pieces * (BLOCK_M * BLOCK_N)
        tl.store(mine + piece * (BLOCK_M * BLOCK_N) + inside, part)
        tl.debug_barrier()  # all threads have written before one of them signals
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == pieces - 1:
            total = tl.load(mine + inside, cache_modifier=".cg")
            for i in range(1, pieces):
                total += tl.load(mine + i * (BLOCK_M * BLOCK_N) + inside, cache_modifier=".cg")
            _finish(total, out, bias, rows, channels, M, N, BIAS, ADD)
            tl.store(arrived + tile, 0)  # the next call counts from zero
    else:
        whole = _piece(x_desc, w_desc, m, n, 0, pieces, steps, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        for i in range(1, pieces):
            whole += _piece(x_desc, w_desc, m, n, i, pieces, steps, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        _finish(whole, out, bias, rows, channels, M, N, BIAS, ADD)


def invariant_gemm(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None,
    add: bool = False, arrived: torch.Tensor | None = None, dtype: torch.dtype | None = None,
    tiling: InvariantTiling | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [m, k], whose rows may be parts of wider ones, w [n, k] of the same type, bias [n] -> [m, n] in `dtype` (as x
    when not given). k is a multiple of 8. With `add` the product is added to `out`, before it is rounded.

    `arrived` comes from `int8_gemm.arrivals`; without it split shapes zero their own counters.
    """
    (m, k), n = x.shape, len(w)
    assert w.shape == (n, k) and k % WIDTH_MULTIPLE == 0 and w.is_contiguous() and x.dtype == w.dtype
    if x.stride(1) != 1 or x.stride(0) % WIDTH_MULTIPLE or x.data_ptr() % 16:
        x = x.contiguous()
    out = torch.empty(m, n, dtype=dtype or x.dtype, device=x.device) if out is None else out
    assert out.shape == (m, n) and out.is_contiguous()
    if m == 0:
        return out
    t, pieces, early = tiling or choose_invariant(m, n, k), num_pieces(n, k), x.is_cuda
    split, tiles = t.split and pieces > 1, triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    parts = torch.empty(tiles * pieces * t.block_m * t.block_n if split else 1, dtype=torch.float32, device=x.device)
    if split and (arrived is None or len(arrived) < tiles):
        arrived = arrivals(x.device, tiles)
    product_kernel[(triton.cdiv(m, t.block_m), triton.cdiv(n, t.block_n), pieces if split else 1)](
        TensorDescriptor.from_tensor(x, [t.block_m, BLOCK_K]), TensorDescriptor.from_tensor(w, [t.block_n, BLOCK_K]),
        out, out if bias is None else bias, parts, parts if arrived is None else arrived, m, n, k, pieces,
        BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=BLOCK_K, SPLIT=split, BAND=t.band,
        BIAS=bias is not None, ADD=add, PRECISION=_precision(x), EARLY=early, num_warps=t.num_warps,
        num_stages=t.num_stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def head_kernel(
    x, w, out, M, N, K, x_row, x_head, w_head, w_row, w_column, out_row, out_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of channels, heads)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    x += head * x_head + rows.to(tl.int64)[:, None] * x_row
    w += head * w_head + channels[:, None] * w_row
    live, real = (rows < M)[:, None], (channels < N)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = (k + depth < K)[None, :]
        tall = tl.load(w + (k + depth)[None, :] * w_column, mask=real & inside, other=0.0)
        narrow = tl.load(x + (k + depth)[None, :], mask=live & inside, other=0.0)
        total = tl.dot(tall, narrow.T, total, input_precision=PRECISION)
    at = out + head * out_head + rows.to(tl.int64)[None, :] * out_row + channels[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[None, :] & real)


def invariant_bmm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, heads, k] x w [heads, n, k]^T -> out [rows, heads, n]. All may be views; k of x and n of out are
    dense."""
    (rows, heads, k), n = x.shape, w.shape[1]
    assert w.shape == (heads, n, k) and out.shape == (rows, heads, n) and x.stride(2) == out.stride(2) == 1
    assert x.dtype == w.dtype == out.dtype
    if rows == 0:
        return
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    head_kernel[(triton.cdiv(rows, block_m), triton.cdiv(n, 64), heads)](
        x, w, out, rows, n, k, *x.stride()[:2], *w.stride(), *out.stride()[:2],
        BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=BLOCK_K, PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip


def _precision(x: torch.Tensor) -> str:
    """Tests only: products of float32 are not rounded to tf32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
