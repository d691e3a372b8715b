"""The int8 product of few rows for Hopper, in Gluon: weights stream through a ring, everybody has an even share.

Weights are the tall side of each product and tokens its narrow side. The steps of all tiles lie one behind the other
and are cut into as many even shares as there are programs, wherever the cuts fall: no last wave with idle
multiprocessors. Who has a piece of a tile leaves integers, and whoever comes last adds them: nobody waits for anybody.
Weights, unlike rows, do not come from the kernel before this one: with `early` the ring is filled with them while that
one still runs, so nobody may write weights right before a product that reads them. As in `wide.py`, all warps do the
same things, and on a CPU the narrow kernel stands in.
"""

from __future__ import annotations

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
    from tripool.kernels.triton.int8_gemm import Stream


@gluon.jit
def _rows_and_channels(tile, tiles_m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row and first channel of a tile: tiles of the same weights are neighbours."""
    return tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N


@gluon.jit
def _next(slot, STAGES: gl.constexpr):
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _owner(unit, units, programs):
    """Whose share a step is in: shares are [p * units // programs, (p + 1) * units // programs)."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def _write(y, out, row, col, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Channels x tokens -> tokens x channels, neighbouring channels by the same thread."""
    WARPS: gl.constexpr = gl.num_warps()
    ALONG: gl.constexpr = 8
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
    y = gl.convert_layout(gl.permute(y, (1, 0)), flat)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, flat))
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, flat))
    at = out + gl.expand_dims(rows.to(gl.int64) * N, 1) + gl.expand_dims(cols, 0)
    gl.store(at, y, mask=gl.expand_dims(rows < M, 1) & gl.expand_dims(cols < N, 0))


@gluon.jit
def _finish(total, by_row, by_col, out, row, col, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    y = (total.to(gl.float32) * gl.expand_dims(by_row, 0) * gl.expand_dims(by_col, 1)).to(gl.bfloat16)
    if BLOCK_M * BLOCK_N > 16384:  # in two halves: what turns a tile around takes shared memory from the ring
        HALF: gl.constexpr = BLOCK_M // 2
        first, second = gl.split(gl.permute(gl.reshape(y, (BLOCK_N, 2, HALF)), (0, 2, 1)))
        _write(first, out, row, col, M, N, HALF, BLOCK_N)
        _write(second, out, row + HALF, col, M, N, HALF, BLOCK_N)
    else:
        _write(y, out, row, col, M, N, BLOCK_M, BLOCK_N)


@gluon.jit
def _add_up(total, parts, arrived, tile, begin, steps, units, programs, inside, SIZE: gl.constexpr):
    """Leaves this program's piece of a tile; true, and the sum, for the one that finds all the others' there.

    A program has two places: one for the tile its share begins in, one for the tile its share ends in.
    """
    me, one = gl.program_id(0), _owner(tile * steps, units, programs)
    others = _owner((tile + 1) * steps - 1, units, programs) - one
    gl.store(parts + (2 * me + (begin == 0).to(gl.int32)).to(gl.int64) * SIZE + inside, total)
    gl.thread_barrier()  # every thread's part is written before one thread says so
    last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == others
    if last:
        total = gl.load(parts + (2 * one + 1).to(gl.int64) * SIZE + inside, cache_modifier=".cg")
        for other in range(one + 1, one + others + 1):
            total += gl.load(parts + 2 * other * SIZE + inside, cache_modifier=".cg")
        gl.store(arrived + tile, 0)  # as it was found: the next call counts from zero
    return last, total


@gluon.jit(do_not_specialize=["M", "programs"])
def stream_kernel(
    x_desc, w_desc, out, x_scale, w_scale, parts, arrived, M, N, K, programs,
    STAGES: gl.constexpr, WHOLE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    BOTH: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, min(BLOCK_M, 128), 32]
    )
    x_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    tiles_m, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(K, BLOCK_K)
    units = tiles_m * gl.cdiv(N, BLOCK_N) * steps
    even = gl.cdiv(N, BLOCK_N) * tiles_m if WHOLE else units
    first, stop = gl.program_id(0) * even // programs, (gl.program_id(0) + 1) * even // programs
    if WHOLE:
        first, stop = first * steps, stop * steps
    if EARLY > 0:
        gdc_launch_dependents()
        if EARLY == 1:
            gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        unit = first + stage
        _, col = _rows_and_channels(unit // steps, tiles_m, BLOCK_M, BLOCK_N)
        mbarrier.expect(full.index(stage), BOTH, pred=unit < stop)
        depth = unit % steps * BLOCK_K
        tma.async_copy_global_to_shared(w_desc, [col, depth], full.index(stage), w_tiles.index(stage), pred=unit < stop)
    if EARLY == 2:
        gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        unit = first + stage
        row, _ = _rows_and_channels(unit // steps, tiles_m, BLOCK_M, BLOCK_N)
        depth = unit % steps * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [row, depth], full.index(stage), x_tiles.index(stage), pred=unit < stop)
    ahead = first + STAGES - 1  # the step whose operands are loaded next, and where they lie
    step = ahead % steps
    row, w_row = _rows_and_channels(ahead // steps, tiles_m, BLOCK_M, BLOCK_N)
    into, slot, phase = STAGES - 1, 0, 0
    inside_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    inside_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    inside = gl.expand_dims(inside_n * BLOCK_M, 1) + gl.expand_dims(inside_m, 0)
    for tile in range(first // steps, gl.cdiv(stop, steps)):
        begin, end = gl.maximum(first - tile * steps, 0), gl.minimum(stop - tile * steps, steps)
        top, left = _rows_and_channels(tile, tiles_m, BLOCK_M, BLOCK_N)
        # Asked for now, needed at the end: it comes from memory while the tile is computed.
        by_col = gl.load(w_scale + left + inside_n, mask=left + inside_n < N, other=0.0)
        total = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
        for k in range(begin, end):
            mbarrier.wait(full.index(slot), phase)
            x_tile = x_tiles.index(slot).permute((1, 0))
            total = warpgroup_mma(w_tiles.index(slot), x_tile, total, use_acc=k > begin, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))  # the step before this one is done with its operands
            arrival = full.index(into)
            mbarrier.expect(arrival, BOTH, pred=ahead < stop)
            depth = step * BLOCK_K
            tma.async_copy_global_to_shared(w_desc, [w_row, depth], arrival, w_tiles.index(into), pred=ahead < stop)
            tma.async_copy_global_to_shared(x_desc, [row, depth], arrival, x_tiles.index(into), pred=ahead < stop)
            phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
            slot = _next(slot, STAGES)
            into = _next(into, STAGES)
            ahead += 1
            step += 1
            if step == steps:
                step = 0
                row, w_row = _rows_and_channels(ahead // steps, tiles_m, BLOCK_M, BLOCK_N)
        total = warpgroup_mma_wait(0, deps=(total,))
        last = end > begin
        if not WHOLE:  # noqa: SIM102  (this one is decided when it is compiled)
            if end - begin < steps:
                last, total = _add_up(
                    total, parts, arrived, tile, begin, steps, units, programs, inside, BLOCK_M * BLOCK_N)  # fmt: skip
        if last:
            by_row = gl.load(x_scale + top + inside_m, mask=top + inside_m < M, other=0.0)
            _finish(total, by_row, by_col, out, top, left, M, N, BLOCK_M, BLOCK_N)


def num_shares(t: Stream, m: int, n: int, k: int, num_sms: int) -> int:
    """How many programs share the steps; of whole tiles, as few as need no more time."""
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
    tiles = -(-m // t.block_m) * -(-n // t.block_n)
    sms = t.programs or torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = num_shares(t, m, n, k, sms)
    shared = 1 if t.whole else programs * t.block_m * t.block_n * 2
    parts = torch.empty(shared, dtype=torch.int32, device=x.device)
    if t.whole:
        arrived = parts
    elif arrived is None or len(arrived) < tiles:
        arrived = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    bytes_8 = gl.NVMMASharedLayout.get_default_for([t.block_n, t.block_k], gl.int8)
    stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [t.block_m, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(w, [t.block_n, t.block_k], bytes_8),
        out, x_scale, w_scale, parts, arrived, m, n, k, programs, STAGES=t.num_stages, WHOLE=t.whole,
        EARLY=t.early, num_warps=t.num_warps, **({"launch_pdl": True} if t.early else {}),
    )  # fmt: skip
    return out
