"""The wide int8 product for Hopper, in Gluon: one product is in flight while the next operands are awaited.

Triton's own loop drains the matrix unit at every step; this one waits for the previous step and reuses its stage of
shared memory for the next load. All warps of a program do the same work, so no warp role can wait for another for ever.
The grid is persistent: a program takes every n-th tile, in bands of rows so that adjacent programs share operands in
the L2, and the first loads of a tile run while the previous one is written.

Gluon has no interpreter: on a CPU `int8_gemm` and `grouped_gemm` use the narrow kernel; tests of this one need a GPU.
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
    from tripool.kernels.triton.tilings import Wide


@gluon.jit
def _tile_origin(tile, plan, tiles_m, tiles_n, BAND: gl.constexpr, BLOCK_M: gl.constexpr, GROUPED: gl.constexpr):
    """(expert, first row, stop row, channel block) of a tile; clamped to the last tile."""
    tile = gl.maximum(gl.minimum(tile, tiles_m * tiles_n - 1), 0)
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    height = gl.maximum(gl.minimum(tiles_m - first, BAND), 1)
    m = first + tile % per_band % height
    n = tile % per_band // height
    if GROUPED:
        return gl.load(plan + 3 * m), gl.load(plan + 3 * m + 1), gl.load(plan + 3 * m + 2), n
    else:  # noqa: RET505  (both returns are compiled otherwise)
        return tile * 0, m * BLOCK_M, (m + 1) * BLOCK_M, n


@gluon.jit
def _load(x_desc, w_desc, x_tiles, w_tiles, full, slot, row, w_row, depth, pred):
    """Load one step's operands into a stage; the barrier `full` completes when both have arrived."""
    arrival = full.index(slot)
    mbarrier.expect(arrival, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(x_desc, [row, depth], arrival, x_tiles.index(slot), pred=pred)
    tma.async_copy_global_to_shared(w_desc, [w_row, depth], arrival, w_tiles.index(slot), pred=pred)


@gluon.jit
def _next(slot, STAGES: gl.constexpr):
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _put(out_desc, staging, y, row, col):
    tma.store_wait(0)  # the staging tile may still be in use
    staging.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, col], staging)


@gluon.jit
def _put_some(out, y, rows, cols, stop, N):
    """Masked store: rows from `stop` on belong to another expert."""
    at = out + gl.expand_dims(rows.to(gl.int64) * N, 1) + gl.expand_dims(cols, 0)
    gl.store(at, y, mask=gl.expand_dims(rows < stop, 1) & gl.expand_dims(cols < N, 0))


@gluon.jit
def _finish(
    total, out_desc, staging, out, x_scale, w_scale, expert, row, stop, col, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUPED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Scale a tile, add what is in its place if ADD, and write it in two halves of its channels, so that half a tile of
    shared memory is enough.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, HALF, 32]
    )
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    by_row = gl.load(x_scale + rows, mask=rows < M, other=0.0)
    channel_halves = gl.split(gl.permute(gl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    for half in gl.static_range(2):
        cols = col + half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        by_col = gl.load(w_scale + expert * N + cols, mask=cols < N, other=0.0)
        y = gl.convert_layout(channel_halves[half], layout).to(gl.float32)
        y = y * gl.expand_dims(by_row, 1) * gl.expand_dims(by_col, 0)
        if ADD:
            at = out + gl.expand_dims(rows.to(gl.int64) * N, 1) + gl.expand_dims(cols, 0)
            inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(cols < N, 0)
            y += gl.load(at, mask=inside, other=0.0).to(gl.float32)
        y = y.to(gl.bfloat16)
        if GROUPED:
            if row + BLOCK_M <= stop:
                _put(out_desc, staging, y, row, col + half * HALF)
            else:
                _put_some(out, y, rows, cols, stop, N)
        else:
            _put(out_desc, staging, y, row, col + half * HALF)


@gluon.jit(do_not_specialize=["M", "programs"])
def wide_kernel(
    x_desc, w_desc, out_desc, out, x_scale, w_scale, plan, num_blocks, M, N, K, programs,
    BAND: gl.constexpr, STAGES: gl.constexpr, GROUPED: gl.constexpr, EARLY: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, min(BLOCK_N, 128), 32]
    )
    x_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N // 2], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    if EARLY > 0:
        gdc_launch_dependents()
        gdc_wait()
    tiles_m = gl.cdiv(M, BLOCK_M)
    if GROUPED:
        tiles_m = gl.load(num_blocks)
    tiles_n, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    tiles = tiles_m * tiles_n
    ahead = gl.program_id(0)  # the tile whose operands are being loaded, and how deep
    step = 0
    expert, row, _, n = _tile_origin(ahead, plan, tiles_m, tiles_n, BAND, BLOCK_M, GROUPED)
    w_row = expert * N + n * BLOCK_N
    into = 0
    for _stage in gl.static_range(STAGES - 1):
        _load(x_desc, w_desc, x_tiles, w_tiles, full, into, row, w_row, step * BLOCK_K, ahead < tiles)
        into = _next(into, STAGES)
        step += 1
        if step == steps:
            step = 0
            ahead += programs
            expert, row, _, n = _tile_origin(ahead, plan, tiles_m, tiles_n, BAND, BLOCK_M, GROUPED)
            w_row = expert * N + n * BLOCK_N
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, programs):
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, layout)
        for k in range(steps):
            mbarrier.wait(full.index(slot), phase)
            w_tile = w_tiles.index(slot).permute((1, 0))
            total = warpgroup_mma(x_tiles.index(slot), w_tile, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))  # the step before this one is done with its operands
            _load(x_desc, w_desc, x_tiles, w_tiles, full, into, row, w_row, step * BLOCK_K, ahead < tiles)
            phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
            slot = _next(slot, STAGES)
            into = _next(into, STAGES)
            step += 1
            if step == steps:
                step = 0
                ahead += programs
                expert, row, _, n = _tile_origin(ahead, plan, tiles_m, tiles_n, BAND, BLOCK_M, GROUPED)
                w_row = expert * N + n * BLOCK_N
        total = warpgroup_mma_wait(0, deps=(total,))
        tile_expert, top, stop, column = _tile_origin(tile, plan, tiles_m, tiles_n, BAND, BLOCK_M, GROUPED)
        _finish(
            total, out_desc, staging, out, x_scale, w_scale, tile_expert, top, stop, column * BLOCK_N, M, N,
            BLOCK_M, BLOCK_N, GROUPED, ADD,
        )  # fmt: skip
    tma.store_wait(0)


def launch_wide(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, t: Wide,
    plan: torch.Tensor | None = None, num_blocks: torch.Tensor | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """w [n, k], or [experts, n, k] with a plan of blocks of `block_m` rows (see `grouped_gemm`)."""
    (m, k), n = x.shape, w.shape[-2]
    bytes_8 = gl.NVMMASharedLayout.get_default_for([t.block_m, t.block_k], gl.int8)
    bytes_16 = gl.NVMMASharedLayout.get_default_for([t.block_m, t.block_n // 2], gl.bfloat16)
    sms = t.programs or torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks_m = -(-m // t.block_m) if plan is None else len(plan)
    programs = min(sms * t.per_sm, blocks_m * -(-n // t.block_n))
    wide_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [t.block_m, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(w.view(-1, k), [t.block_n, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // 2], bytes_16),
        out, x_scale, w_scale, out if plan is None else plan, out if num_blocks is None else num_blocks, m, n, k,
        programs, BAND=t.band, STAGES=t.num_stages, GROUPED=plan is not None, EARLY=t.early, ADD=add,
        num_warps=t.num_warps, **({"launch_pdl": True} if t.early else {}),
    )  # fmt: skip
    return out
