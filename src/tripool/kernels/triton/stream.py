"""int8 product of few rows for Hopper, in Gluon: weights stream through a ring buffer, programs have even shares.

Weights are the tall side of each product and tokens the narrow side. The steps of all tiles are numbered consecutively
and divided into even shares, one per program, wherever the cuts fall: no last wave with idle multiprocessors. A program
with a piece of a tile adds its integers, together with the depth of the piece, to a sum in memory; the program whose
addition completes an element writes it, so no program waits for another.
Weights, unlike rows, do not come from the previous kernel: with `early` the ring is filled with them while that kernel
still runs, so weights must not be written right before a product that reads them. As in `wide.py`, all warps do the
same work, and on a CPU the narrow kernel is used instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from tripool.kernels.triton.tilings import Stream

DEEPEST, MOST_STEPS = 16384, 64
STAGING_BYTES = 16384
"""Shared memory for transposing tiles on output; larger ones go in parts."""


@gluon.jit
def _next(slot, STAGES: gl.constexpr):
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _tile_origin(tile, tiles_m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ONE: gl.constexpr):
    """First row and first channel of a tile: tiles of the same weights are adjacent."""
    if ONE:
        return tile * 0, tile * BLOCK_N
    else:  # noqa: RET505  (both returns are compiled otherwise)
        return tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N


@gluon.jit
def _after(tile, step, steps):
    """The next step. A division each time would take longer than a load."""
    last = step == steps - 1
    return gl.where(last, tile + 1, tile), gl.where(last, 0, step + 1)


@gluon.jit
def prefetch_descriptors(KERNEL: gl.constexpr, NUM: gl.constexpr):
    """Prefetch the kernel's descriptors, so that their first use does not wait."""
    for i in gl.static_range(NUM):
        gl.inline_asm_elementwise(
            f"prefetch.param.tensormap [{KERNEL}_param_{5 * i}]; // $0",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def _put(out_desc, staging, y, row, col):
    """Transpose channels x tokens to tokens x channels and store asynchronously."""
    tma.store_wait(0)  # the staging tile may still be in use
    staging.store(gl.permute(y, (1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, col], staging)


@gluon.jit
def put_all(out_desc, staging, y, row, col):
    """Store in as many parts as the staging tile requires."""
    CHANNELS: gl.constexpr = y.shape[0]
    HALF: gl.constexpr = y.shape[1] // 2
    if staging.shape[0] > HALF:
        _put(out_desc, staging, y, row, col)
    else:
        first, second = gl.split(gl.permute(gl.reshape(y, (CHANNELS, 2, HALF)), (0, 2, 1)))
        put_all(out_desc, staging, first, row, col)
        put_all(out_desc, staging, second, row + HALF, col)


@gluon.jit
def _lanes_together(n, pair, BLOCK_N: gl.constexpr):
    """Index of a pair among the sums of its tile, ordered so that a warp's accesses are contiguous."""
    by_lane = (pair & 3) + (n & 7) * 4 + (n >> 4) * 32
    return by_lane + ((n >> 3 & 1) + (pair >> 2) * 2) * (2 * BLOCK_N)


@gluon.jit
def _low(both):
    """The signed number in the lower 29 bits."""
    return both << 35 >> 35


@gluon.jit
def pairs_of(total):
    """Channels x rows -> even and odd rows."""
    return gl.split(gl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))


@gluon.jit
def scales_of_pairs(x_scale, w_scale, row, col, M, N, like):
    """Scales by even row, by odd row and by channel, in the layout of `like`; loaded before they are needed."""
    n = col + gl.expand_dims(gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout)), 1)
    m = row + 2 * gl.expand_dims(gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout)), 0)
    by_even = gl.load(x_scale + m, mask=m < M, other=0.0)
    by_odd = gl.load(x_scale + m + 1, mask=m + 1 < M, other=0.0)
    return by_even, by_odd, gl.load(w_scale + n, mask=n < N, other=0.0)


@gluon.jit
def add_piece(total, scales, sums, out, row, col, depth, steps, M, N):
    """Add a piece of a tile to the tile's sums and write the elements that are complete.

    Two rows share one 64-bit number: 6 bits count the steps added, 29 and 29 bits are sums, which products less than
    16,384 deep cannot overflow. Two in one, because the L2 is limited by the number of atomic additions, not by their
    width. Completed pairs are reset to zero for the next call.
    """
    even, odd = pairs_of(total.to(gl.int64))
    by_even, by_odd, by_channel = scales
    n = gl.expand_dims(gl.arange(0, even.shape[0], gl.SliceLayout(1, even.type.layout)), 1)
    pair = gl.expand_dims(gl.arange(0, even.shape[1], gl.SliceLayout(0, even.type.layout)), 0)
    at = sums + _lanes_together(n, pair, even.shape[0])
    mine = (gl.to_tensor(depth).to(gl.int64) << 58) + (odd << 29) + even
    now = gl.atomic_add(at, mine, sem="relaxed") + mine
    even = _low(now)
    rest = (now - even) >> 29
    odd = _low(rest)
    whole = ((rest - odd) >> 29 & 63) == (steps & 63)
    gl.store(at, gl.zeros_like(now), mask=whole)
    n, m = col + n, row + 2 * pair
    to = out + m.to(gl.int64) * N + n
    gl.store(to, (even.to(gl.float32) * by_even * by_channel).to(gl.bfloat16), mask=whole & (n < N) & (m < M))
    gl.store(to + N, (odd.to(gl.float32) * by_odd * by_channel).to(gl.bfloat16), mask=whole & (n < N) & (m + 1 < M))


@gluon.jit
def _fill(
    x_desc, w_desc, tiles, full, tile, step, num, steps, tiles_m,
    ONE: gl.constexpr, WEIGHTS: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, EXPECT_FROM: gl.constexpr,
):  # fmt: skip
    """Load one operand of stages FIRST to LAST and set the expected bytes of stages from EXPECT_FROM on.
    Returns the next step.
    """
    for stage in gl.static_range(FIRST, LAST):
        if stage >= EXPECT_FROM:
            mbarrier.expect(full.index(stage), x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=stage < num)
        row, col = _tile_origin(tile, tiles_m, x_desc.block_type.shape[0], w_desc.block_type.shape[0], ONE)
        depth = step * w_desc.block_type.shape[1]
        if WEIGHTS:
            tma.async_copy_global_to_shared(
                w_desc, [col, depth], full.index(stage), tiles.index(stage), pred=stage < num
            )
        else:
            tma.async_copy_global_to_shared(
                x_desc, [row, depth], full.index(stage), tiles.index(stage), pred=stage < num
            )
        tile, step = _after(tile, step, steps)
    return tile, step


@gluon.jit(do_not_specialize=["M", "share", "longer"])
def stream_kernel(
    x_desc, w_desc, out_desc, out, x_scale, w_scale, sums, M, N, K, share, longer,
    STAGES: gl.constexpr, WHOLE: gl.constexpr, EARLY: gl.constexpr, ONE: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """Each program has `share` steps (or whole tiles), the first `longer` programs one more."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    PAIRS: gl.constexpr = BLOCK_M * BLOCK_N // 2
    BOTH: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, min(BLOCK_M, 128), 32]
    )
    x_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    prefetch_descriptors("stream_kernel", 3)
    if EARLY > 0:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    program = gl.program_id(0)
    tiles_m, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(K, BLOCK_K)
    first, num = program * share + gl.minimum(program, longer), share + (program < longer).to(gl.int32)
    if WHOLE:
        tile, step, num = first, first * 0, num * steps
    else:
        tile = first // steps
        step = first - tile * steps
    if EARLY == 1:
        gdc_wait()
    ahead, deep = _fill(x_desc, w_desc, w_tiles, full, tile, step, num, steps, tiles_m, ONE, True, 0, BEFORE, 0)
    if EARLY == 2:
        gdc_wait()
    _fill(x_desc, w_desc, x_tiles, full, tile, step, num, steps, tiles_m, ONE, False, 0, STAGES, BEFORE)
    ahead, deep = _fill(  # the step whose operands are loaded next
        x_desc, w_desc, w_tiles, full, ahead, deep, num, steps, tiles_m, ONE, True, BEFORE, STAGES, STAGES
    )
    into, slot, phase, done = STAGES - 1, 0, 0, 0
    inside_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    lanes = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    while done < num:
        top, left = _tile_origin(tile, tiles_m, BLOCK_M, BLOCK_N, ONE)
        # Loaded now, needed at the end: the latency is hidden by the product.
        by_col = gl.load(w_scale + left + inside_n, mask=left + inside_n < N, other=0.0)
        by_row = gl.load(x_scale + top + lanes, mask=top + lanes < M, other=0.0)
        total = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        piece = gl.minimum(steps - step, num - done)
        for k in range(piece):
            mbarrier.wait(full.index(slot), phase)
            transposed = x_tiles.index(slot).permute((1, 0))
            total = warpgroup_mma(w_tiles.index(slot), transposed, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))  # the step before this one is done with its operands
            if (done + k > 0) & (done + k + STAGES - 1 < num):
                row, col = _tile_origin(ahead, tiles_m, BLOCK_M, BLOCK_N, ONE)
                arrival, depth = full.index(into), deep * BLOCK_K
                mbarrier.expect(arrival, BOTH)
                tma.async_copy_global_to_shared(w_desc, [col, depth], arrival, w_tiles.index(into))
                tma.async_copy_global_to_shared(x_desc, [row, depth], arrival, x_tiles.index(into))
                ahead, deep = _after(ahead, deep, steps)
            phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
            slot = _next(slot, STAGES)
            into = _next(into, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        if WHOLE or piece == steps:
            here = gl.convert_layout(by_row, gl.SliceLayout(0, layout))
            scaled = total.to(gl.float32) * gl.expand_dims(here, 0) * gl.expand_dims(by_col, 1)
            put_all(out_desc, staging, scaled.to(gl.bfloat16), top, left)
        else:
            even = pairs_of(total)[0]
            scales = scales_of_pairs(x_scale, w_scale, top, left, M, N, even)
            add_piece(total, scales, sums + tile.to(gl.int64) * PAIRS, out, top, left, piece, steps, M, N)
        done += piece
        step = 0
        tile += 1
    tma.store_wait(0)


def num_shares(t: Stream, m: int, n: int, k: int, num_sms: int) -> int:
    """Number of programs; for whole tiles, the fewest that need no more time."""
    tiles = -(-m // t.block_m) * -(-n // t.block_n)
    most = num_sms * t.per_sm
    if t.whole:
        return -(-tiles // -(-tiles // most))
    return min(most, tiles * -(-k // t.block_k))


def launch_stream(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor,
    arrived: torch.Tensor | None, t: Stream,
) -> torch.Tensor:  # fmt: skip
    (m, k), n = x.shape, len(w)
    if not t.whole and (k >= DEEPEST or k > MOST_STEPS * t.block_k):  # limits of the packed sums and step counts
        t = replace(t, whole=True)
    tiles = -(-m // t.block_m) * -(-n // t.block_n)
    sms = t.programs or torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = num_shares(t, m, n, k, sms)
    share, longer = divmod(tiles if t.whole else tiles * -(-k // t.block_k), programs)
    size = tiles * t.block_m * t.block_n  # two 32-bit numbers for each pair of rows
    if t.whole:
        arrived = torch.empty(2, dtype=torch.int32, device=x.device)  # unused
    elif arrived is None or len(arrived) < size:
        arrived = torch.zeros(size, dtype=torch.int32, device=x.device)
    transposed = [min(t.block_m, STAGING_BYTES // (2 * t.block_n)), t.block_n]
    bytes_8 = gl.NVMMASharedLayout.get_default_for([t.block_n, t.block_k], gl.int8)
    bytes_16 = gl.NVMMASharedLayout.get_default_for(transposed, gl.bfloat16)
    stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [t.block_m, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(w, [t.block_n, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(out, transposed, bytes_16),
        out, x_scale, w_scale, arrived.view(torch.int64), m, n, k, share, longer,
        STAGES=t.num_stages, WHOLE=t.whole, EARLY=t.early, ONE=m <= t.block_m, BEFORE=t.before or t.num_stages,
        num_warps=t.num_warps, **({"launch_pdl": True} if t.early else {}),
    )  # fmt: skip
    return out
