"""int8 [rows, in] x int8 [out, in]^T -> bfloat16 [rows, out], scaled by row and by channel, on CUDA.

Four kernels. Narrow, here: weights are the tall side of each product and tokens the narrow side, so a batch of 16 needs
no padding and weights are read once; the depth is split until every multiprocessor has work. Splits write integer
partial sums and the last program to arrive adds them: integer sums, so the result does not depend on the order. Wide
(`wide.py`), in Gluon, for 128 rows and more, where the matrix units are the limit. Stream (`stream.py`), also in Gluon,
for up to 256 rows: as Narrow, but with even shares instead of splits, and with weights loaded ahead. Resident
(`resident.py`) for few rows and small weights, which it fetches while the previous product still computes.

`tilings.py` chooses among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tripool.kernels.triton.tilings import Narrow, Resident, Stream, Tiling, Wide, choose


@triton.jit
def _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert, ADD: tl.constexpr):
    """Scale channels x tokens of integers and write them as tokens x channels, or add them to what is there."""
    by_token = tl.load(x_scale + rows, mask=rows < stop, other=0.0)
    by_channel = tl.load(w_scale + expert * N + cols, mask=cols < N, other=0.0)
    y = total.to(tl.float32) * by_token[None, :] * by_channel[:, None]
    at = out + rows.to(tl.int64)[None, :] * N + cols[:, None]
    inside = (rows < stop)[None, :] & (cols < N)[:, None]
    if ADD:
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, y.to(tl.bfloat16), mask=inside)


@triton.jit
def _prefetch(w, row, first, last, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Prefetch this program's weights into the L2, a line of 128 bytes at a time, without waiting."""
    rows = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1).to(tl.int64) * K
    lines = tl.arange(0, BLOCK_K // 128) * 128
    for k in range(first, last):
        at = w + rows[:, None] + tl.minimum(k * BLOCK_K + lines, K - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["M", "splits"])
def narrow_kernel(
    x_desc, w_desc, w, out, x_scale, w_scale, parts, arrived, plan, num_blocks, M, N, K, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, GROUPED: tl.constexpr,
    BAND: tl.constexpr, EARLY: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, blocks of channels, splits). With a plan, each block of tokens has its expert."""
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if BAND > 0:
        place, per_band = n * tl.num_programs(0) + m, BAND * tl.num_programs(1)
        above = place // per_band * BAND
        height = tl.minimum(tl.num_programs(0) - above, BAND)
        m, n = above + place % per_band % height, place % per_band // height
    if EARLY > 0:
        gdc_launch_dependents()
        if EARLY == 2 and not GROUPED:  # a prefetch into the L2 is coherent with writes: safe before the wait
            steps = tl.cdiv(K, BLOCK_K)
            _prefetch(w, n * BLOCK_N, split * steps // splits, (split + 1) * steps // splits, N, K, BLOCK_N, BLOCK_K)
        gdc_wait()
    expert, row, stop = 0, m * BLOCK_M, M
    if GROUPED:
        if m >= tl.load(num_blocks):
            return
        expert, row, stop = tl.load(plan + 3 * m), tl.load(plan + 3 * m + 1), tl.load(plan + 3 * m + 2)
    steps = tl.cdiv(K, BLOCK_K)
    first, last = split * steps // splits, (split + 1) * steps // splits
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for k in range(first, last):
        w_tile = w_desc.load([expert * N + n * BLOCK_N, k * BLOCK_K])
        x_tile = x_desc.load([row, k * BLOCK_K])
        total = tl.dot(w_tile, x_tile.T, total, out_dtype=tl.int32)
    rows, cols = row + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    if not SPLIT:
        _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert, ADD)
    else:
        tile = (m * tl.num_programs(1) + n).to(tl.int64)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = parts + tile * splits * (BLOCK_M * BLOCK_N)
        tl.store(mine + split * (BLOCK_M * BLOCK_N) + inside, total)
        tl.debug_barrier()  # all threads have written before one of them signals
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
            for s in range(splits):
                total += tl.load(mine + s * (BLOCK_M * BLOCK_N) + inside, cache_modifier=".cg")
            _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert, ADD)
            tl.store(arrived + tile, 0)  # the next call counts from zero


def arrivals(device: torch.device | str, count: int = 1 << 21) -> torch.Tensor:
    """Counters and sums: zeros before and after every call. One per stream; large enough for any shape here."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def int8_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    out: torch.Tensor | None = None, arrived: torch.Tensor | None = None,
    tiling: Tiling | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x int8 [m, k], w int8 [n, k], scales float32 [m] and [n] -> bfloat16 [m, n]. k is a multiple of 16.

    With `add` the product is added to `out`, before it is rounded where the kernel is Narrow or Wide. `arrived` comes
    from `arrivals`; without it split shapes zero their own counters.
    """
    (m, k), n = x.shape, len(w)
    assert w.shape == (n, k) and x_scale.shape == (m,) and w_scale.shape == (n,) and k % 16 == 0
    assert x.dtype == w.dtype == torch.int8 and x.is_contiguous() and w.is_contiguous()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    assert out.shape == (m, n) and out.is_contiguous()
    if m == 0:
        return out
    tiling = tiling or choose(m, n, k)
    if add and isinstance(tiling, Resident | Stream) and x.is_cuda:
        return out.add_(int8_gemm(x, x_scale, w, w_scale, None, arrived, tiling))
    if isinstance(tiling, Wide) and x.is_cuda and n % 8 == 0:  # rows of the result start at 16 bytes
        from tripool.kernels.triton.wide import launch_wide

        return launch_wide(x, x_scale, w, w_scale, out, tiling, add=add)
    if isinstance(tiling, Resident) and x.is_cuda and n % 8 == 0:
        from tripool.kernels.triton.resident import launch_resident

        return launch_resident(x, x_scale, w, w_scale, out, arrived, tiling)
    if isinstance(tiling, Stream) and x.is_cuda and n % 8 == 0:
        from tripool.kernels.triton.stream import launch_stream

        return launch_stream(x, x_scale, w, w_scale, out, arrived, tiling)
    t = tiling if isinstance(tiling, Narrow) else Narrow(128, 128, 128, num_warps=8)
    return launch_narrow(x, x_scale, w, w_scale, out, arrived, t, -(-m // t.block_m), add=add)


def launch_narrow(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor,
    arrived: torch.Tensor | None, t: Narrow, blocks_m: int, plan: torch.Tensor | None = None,
    num_blocks: torch.Tensor | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """w [n, k], or [experts, n, k] with a plan of at most `blocks_m` blocks of tokens (see `grouped_gemm`)."""
    (m, k), n = x.shape, w.shape[-2]
    blocks_n = -(-n // t.block_n)
    tiles = blocks_m * blocks_n
    parts = torch.empty(
        tiles * t.splits * t.block_m * t.block_n if t.splits > 1 else 1, dtype=torch.int32, device=x.device
    )
    if t.splits > 1 and (arrived is None or len(arrived) < tiles):
        arrived = arrivals(x.device, tiles)
    early = t.early if x.is_cuda else 0
    narrow_kernel[(blocks_m, blocks_n, t.splits)](
        TensorDescriptor.from_tensor(x, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(w.view(-1, k), [t.block_n, t.block_k]),
        w, out, x_scale, w_scale, parts, arrived if arrived is not None else parts,
        parts if plan is None else plan, parts if num_blocks is None else num_blocks, m, n, k, t.splits,
        BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, SPLIT=t.splits > 1, GROUPED=plan is not None,
        BAND=t.band, EARLY=early, ADD=add, num_warps=t.num_warps, num_stages=t.num_stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
