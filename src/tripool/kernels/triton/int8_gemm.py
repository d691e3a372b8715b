"""int8 [rows, in] x int8 [out, in]^T -> bfloat16 [rows, out], scaled by row and by channel, on CUDA.

Three kernels. Narrow, here: weights are the tall side of each product and tokens its narrow side, so a batch of 16
costs no padding and the weights are read once; the depth is cut into splits until every multiprocessor has work. Splits
leave integer parts, and whoever comes last adds them: sums of integers, so the result does not depend on who that was.
Wide (`wide.py`), in Gluon, for 128 rows and more, where the matrix units are the limit. Stream (`stream.py`), in Gluon
too, for up to 256 rows: as Narrow, but with even shares instead of splits, and weights loaded before their turn.

`choose` says which runs, from shapes alone: nothing is tuned or synchronised at run time, and calls can be captured in
a graph. Which tilings win was measured; see `bench/gpu/gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

NUM_SMS = 132
"""Of the card the table was measured on; another count costs speed, never correctness."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Tokens, channels and depth of a tile, and into how many parts the depth is cut."""

    block_m: int
    block_n: int = 64
    block_k: int = 256
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    band: int = 0
    """Blocks of tokens that go together through all channels, so that both operands stay in the L2; 0: all."""
    early: int = 0
    """1: starts while the kernel before it ends; 2: and asks for its weights before that one's results are there."""


@dataclass(frozen=True, slots=True)
class Wide:
    """Tokens, channels and depth of a tile; `band` as in `Narrow`; `per_sm` programs share a multiprocessor."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    num_stages: int = 4
    num_warps: int = 8
    band: int = 8
    per_sm: int = 1
    early: int = 0
    """1: starts while the kernel before it ends."""
    programs: int = 0
    """Multiprocessors to use, where others hold some; 0: all."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens, channels and depth of a tile; `per_sm` programs share a multiprocessor, and all the steps evenly."""

    block_m: int
    block_n: int = 64
    block_k: int = 128
    num_stages: int = 9
    num_warps: int = 4
    per_sm: int = 1
    whole: bool = False
    """Only whole tiles: fewer programs, and nothing to add up."""
    early: int = 2
    """1: starts while the kernel before it ends; 2: and loads weights before that one's results are there."""
    programs: int = 0
    """Multiprocessors to use, where others hold some; 0: all."""


EARLY = 1
"""How products of few rows start (see `Narrow.early`): half a microsecond sooner, of seven to fourteen."""

MANY_ROWS = Wide(block_m=256, block_n=128)
"""For more rows than a batch in decoding has."""


@triton.jit
def _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert):
    """Channels x tokens of integers -> scaled, written as tokens x channels."""
    by_token = tl.load(x_scale + rows, mask=rows < stop, other=0.0)
    by_channel = tl.load(w_scale + expert * N + cols, mask=cols < N, other=0.0)
    y = (total.to(tl.float32) * by_token[None, :] * by_channel[:, None]).to(tl.bfloat16)
    at = out + rows.to(tl.int64)[None, :] * N + cols[:, None]
    tl.store(at, y, mask=(rows < stop)[None, :] & (cols < N)[:, None])


@triton.jit
def _ask_for(w, row, first, last, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Brings this program's weights towards the L2, a line of 128 bytes at a time, and does not wait for them."""
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
    BAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, blocks of channels, splits). With a plan each block of tokens has its expert."""
    m, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if BAND > 0:
        place, per_band = n * tl.num_programs(0) + m, BAND * tl.num_programs(1)
        above = place // per_band * BAND
        height = tl.minimum(tl.num_programs(0) - above, BAND)
        m, n = above + place % per_band % height, place % per_band // height
    if EARLY > 0:
        gdc_launch_dependents()
        if EARLY == 2 and not GROUPED:  # lines only move to the L2, where writes go too: safe before the wait
            steps = tl.cdiv(K, BLOCK_K)
            _ask_for(w, n * BLOCK_N, split * steps // splits, (split + 1) * steps // splits, N, K, BLOCK_N, BLOCK_K)
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
        _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert)
    else:
        tile = (m * tl.num_programs(1) + n).to(tl.int64)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = parts + tile * splits * (BLOCK_M * BLOCK_N)
        tl.store(mine + split * (BLOCK_M * BLOCK_N) + inside, total)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
            for s in range(splits):
                total += tl.load(mine + s * (BLOCK_M * BLOCK_N) + inside, cache_modifier=".cg")
            _finish(total, out, x_scale, w_scale, rows, stop, cols, N, expert)
            tl.store(arrived + tile, 0)  # as it was found: the next call counts from zero


def arrivals(device: torch.device | str, count: int = 1 << 16) -> torch.Tensor:
    """Counters for splits: zeros, and zeros again after every call. One per stream; big enough for any shape here."""
    return torch.zeros(count, dtype=torch.int32, device=device)


MEASURED: dict[tuple[int, int, int], Narrow | Wide | Stream] = {
    (16, 2112, 7168): Stream(block_m=16, block_k=256, num_stages=10),  # 7.4 µs
    (16, 24576, 1536): Stream(block_m=16, block_k=256, num_stages=5, per_sm=2, whole=True),  # 11.3 µs
    (16, 32768, 512): Stream(block_m=16, block_k=256, num_stages=5, per_sm=2, whole=True),  # 6.5 µs
    (16, 7168, 16384): Stream(block_m=16, block_k=256, num_stages=10, whole=True),  # 30.8 µs
    (16, 4096, 7168): Stream(block_m=16, block_k=256, num_stages=10),  # 10.3 µs
    (16, 7168, 2048): Stream(block_m=16, block_k=256, num_stages=5, per_sm=2, whole=True),  # 5.6 µs
    (16, 36864, 7168): Stream(block_m=16, block_k=256, num_stages=5, whole=True),  # 66.9 µs
    (32, 2112, 7168): Stream(block_m=32, block_k=256, num_stages=4),  # 7.8 µs
    (32, 24576, 1536): Stream(block_m=32, block_k=256, whole=True),  # 11.7 µs
    (32, 32768, 512): Stream(block_m=32, block_k=256, num_stages=4, per_sm=2, whole=True),  # 6.7 µs
    (32, 7168, 16384): Stream(block_m=32, block_k=256, whole=True),  # 31.2 µs
    (32, 4096, 7168): Stream(block_m=32, block_k=256),  # 11.2 µs
    (32, 7168, 2048): Stream(block_m=32, block_k=256, num_stages=4, per_sm=2, whole=True),  # 6.0 µs
    (32, 7168, 18432): Stream(block_m=32, block_k=256, whole=True),  # 34.7 µs
    (128, 2112, 7168): Stream(block_m=128, num_stages=8, whole=True),  # 12.7 µs
    (128, 24576, 1536): Stream(block_m=128, block_n=128, num_stages=3, per_sm=2, whole=True),  # 15.3 µs
    (128, 32768, 512): Stream(block_m=128, block_n=128, num_stages=3, per_sm=2, whole=True, early=1),  # 9.7 µs
    (128, 7168, 16384): Stream(block_m=128, num_stages=8, whole=True),  # 37.7 µs
    (128, 4096, 7168): Stream(block_m=128, num_stages=8, whole=True),  # 14.0 µs
    (128, 7168, 2048): Stream(block_m=128, num_stages=8, whole=True),  # 7.3 µs
    (128, 36864, 7168): Stream(block_m=128, num_stages=8, whole=True),  # 79.7 µs
    (128, 7168, 18432): Stream(block_m=128, num_stages=8, whole=True),  # 39.3 µs
    (256, 2112, 7168): Stream(block_m=128, num_stages=8),  # 13.0 µs
    (256, 24576, 1536): Stream(block_m=256, num_stages=5, whole=True),  # 22.7 µs
    (256, 7168, 16384): Stream(block_m=256, num_stages=5, whole=True),  # 49.2 µs
    (256, 4096, 7168): Stream(block_m=128, num_stages=8, whole=True),  # 14.7 µs
    (256, 7168, 2048): Stream(block_m=128, num_stages=4, per_sm=2, whole=True),  # 9.5 µs
    (256, 7168, 18432): Stream(block_m=256, num_stages=5, whole=True),  # 54.8 µs
}
"""(rows at most, channels, depth) of a model's own products -> what won; `gemm.py --only stream` prints such lines."""


def choose(m: int, n: int, k: int) -> Narrow | Wide | Stream:
    """By shape alone: what won on an H200, see the sweep of `bench/gpu/gemm.py`."""
    if m > 256:
        return MANY_ROWS
    known = MEASURED.get((max(16, 1 << (m - 1).bit_length()), n, k))
    if known is not None:
        return known
    block_m = 16
    while block_m < min(m, 128):
        block_m *= 2
    if block_m <= 32:
        tiles = -(-n // 64)
        if k <= 1536 and block_m == 16:  # shallow: few steps to hide a load behind, so more of them at once
            return Narrow(16, 128, 128, 1, 4, 6, early=EARLY)
        if tiles < NUM_SMS // 2:
            return Narrow(block_m, 64, 256, max(1, min(NUM_SMS // tiles, k // 1024)), 4, 4, early=EARLY)
        return Narrow(block_m, 64, 256, 1, 4, 4 if tiles > 2 * NUM_SMS else 6, early=EARLY)
    tiles = -(-m // block_m) * -(-n // 64)
    if tiles > 2 * NUM_SMS and block_m == 64:
        return Narrow(64, 128, 128, 1, 4, 3, early=EARLY)
    if tiles > 2 * NUM_SMS:  # two programs on each multiprocessor: one loads while the other computes
        if k <= 1536 or m > 128:
            return Wide(128, 128, num_stages=3, num_warps=4, per_sm=2, early=EARLY if k <= 1536 else 0)
        return Wide(128, 64, per_sm=2)
    splits = max(1, min(2 * NUM_SMS // tiles, k // 1536, 4))
    return Narrow(block_m, 64, 128, splits, 4, 4, early=EARLY)


def int8_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    out: torch.Tensor | None = None, arrived: torch.Tensor | None = None,
    tiling: Narrow | Wide | Stream | None = None,
) -> torch.Tensor:  # fmt: skip
    """x int8 [m, k], w int8 [n, k], scales float32 [m] and [n] -> bfloat16 [m, n]. k is a multiple of 16.

    `arrived` comes from `arrivals`; without it split shapes pay for zeroing their counters.
    """
    (m, k), n = x.shape, len(w)
    assert w.shape == (n, k) and x_scale.shape == (m,) and w_scale.shape == (n,) and k % 16 == 0
    assert x.dtype == w.dtype == torch.int8 and x.is_contiguous() and w.is_contiguous()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    assert out.shape == (m, n) and out.is_contiguous()
    if m == 0:
        return out
    tiling = tiling or choose(m, n, k)
    if isinstance(tiling, Wide) and x.is_cuda and n % 8 == 0:  # rows of the result start at 16 bytes
        from tripool.kernels.triton.wide import launch_wide

        return launch_wide(x, x_scale, w, w_scale, out, tiling)
    if isinstance(tiling, Stream) and x.is_cuda:
        from tripool.kernels.triton.stream import launch_stream

        return launch_stream(x, x_scale, w, w_scale, out, arrived, tiling)
    t = tiling if isinstance(tiling, Narrow) else Narrow(128, 128, 128, num_warps=8)
    return launch_narrow(x, x_scale, w, w_scale, out, arrived, t, -(-m // t.block_m))


def launch_narrow(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor,
    arrived: torch.Tensor | None, t: Narrow, blocks_m: int, plan: torch.Tensor | None = None,
    num_blocks: torch.Tensor | None = None,
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
        BAND=t.band, EARLY=early, num_warps=t.num_warps, num_stages=t.num_stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
