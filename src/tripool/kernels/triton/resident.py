"""int8 product of few rows whose weights are loaded onto the multiprocessors before the rows are ready, in Gluon.

As in `stream.py`, weights are the tall side of a product; here each program has one piece of one tile, of a size known
at compile time. The first steps of a piece move on from shared memory to registers, in operand layout; the last ones
stay. So two programs fit on a multiprocessor, one of this product and one of the next, which fetches its weights while
this one computes. It fetches a few steps at a time: a saturated memory system would delay the rows of this product.
Weights must not be written right before a product that reads them.
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

from tripool.kernels.triton.stream import (
    DEEPEST,
    MOST_STEPS,
    add_piece,
    pairs_of,
    prefetch_descriptors,
    scales_of_pairs,
)

if TYPE_CHECKING:
    from tripool.kernels.triton.tilings import Resident


AT_ONCE = gl.constexpr(2)
"""Weight loads in flight: enough to keep the memory busy."""


@gluon.jit
def _keep(held):
    """Keep registers that an asynchronous product reads from being reused before this point."""
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [held], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit(do_not_specialize=["M", "splits"])
def resident_kernel(
    x_desc, w_desc, out, x_scale, w_scale, sums, M, N, K, splits,
    STAGES: gl.constexpr, HELD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    ALL: gl.constexpr = STAGES + HELD
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_M, 32]
    )
    in_registers: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    x_tiles = gl.allocate_shared_memory(gl.int8, [ALL, BLOCK_M, BLOCK_K], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    prefetch_descriptors("resident_kernel", 2)
    if EARLY > 0:
        gdc_launch_dependents()
    mbarrier.init(x_full.index(0), count=1)
    mbarrier.init(x_full.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(w_full.index(stage), count=1)
    fence_async_shared()
    tile = gl.program_id(0) // splits
    col, depth = tile * BLOCK_N, (gl.program_id(0) - tile * splits) * (ALL * BLOCK_K)
    if EARLY == 1:
        gdc_wait()
    held = ()
    for step in gl.static_range(ALL):
        if step >= AT_ONCE:
            mbarrier.wait(w_full.index((step - AT_ONCE) % STAGES), (step - AT_ONCE) // STAGES & 1)
            if step - AT_ONCE < HELD:
                held = held + (w_tiles.index((step - AT_ONCE) % STAGES).load(in_registers),)  # type: ignore[assignment]  # noqa: RUF005
                fence_async_shared()  # read before it is overwritten
        target, arrival = w_tiles.index(step % STAGES), w_full.index(step % STAGES)
        mbarrier.expect(arrival, w_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(w_desc, [col, depth + step * BLOCK_K], arrival, target)
    if EARLY == 2:
        gdc_wait()
    mbarrier.expect(x_full.index(0), HELD * x_desc.block_type.nbytes)
    mbarrier.expect(x_full.index(1), STAGES * x_desc.block_type.nbytes)
    for step in gl.static_range(ALL):
        at = [0, depth + step * BLOCK_K]
        tma.async_copy_global_to_shared(x_desc, at, x_full.index(0 if step < HELD else 1), x_tiles.index(step))
    total = gl.zeros((BLOCK_N, BLOCK_M), gl.int32, layout)
    even = pairs_of(total)[0]
    scales = scales_of_pairs(x_scale, w_scale, 0, col, M, N, even)
    mbarrier.wait(x_full.index(0), 0)
    for step in gl.static_range(ALL):
        x_tile = x_tiles.index(step).permute((1, 0))
        if step < HELD:
            total = warpgroup_mma(held[step], x_tile, total, use_acc=step > 0, is_async=True)
        else:
            if step == HELD:
                mbarrier.wait(x_full.index(1), 0)
            mbarrier.wait(w_full.index(step % STAGES), step // STAGES & 1)
            total = warpgroup_mma(w_tiles.index(step % STAGES), x_tile, total, use_acc=step > 0, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    for step in gl.static_range(HELD):
        _keep(held[step])
    its_sums = sums + tile.to(gl.int64) * (BLOCK_M * BLOCK_N // 2)
    add_piece(total, scales, its_sums, out, 0, col, ALL, splits * ALL, M, N)


def launch_resident(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor,
    arrived: torch.Tensor | None, t: Resident,
) -> torch.Tensor:  # fmt: skip
    (m, k), n = x.shape, len(w)
    tiles, steps = -(-n // t.block_n), t.splits * (t.stages + t.held)
    assert m <= t.block_m and k == steps * t.block_k and t.stages >= AT_ONCE.value
    assert k < DEEPEST and steps <= MOST_STEPS
    size = tiles * t.block_m * t.block_n
    if arrived is None or len(arrived) < size:
        arrived = torch.zeros(size, dtype=torch.int32, device=x.device)
    bytes_8 = gl.NVMMASharedLayout.get_default_for([t.block_n, t.block_k], gl.int8)
    resident_kernel[(tiles * t.splits,)](
        TensorDescriptor.from_tensor(x, [t.block_m, t.block_k], bytes_8),
        TensorDescriptor.from_tensor(w, [t.block_n, t.block_k], bytes_8),
        out, x_scale, w_scale, arrived.view(torch.int64), m, n, k, t.splits,
        STAGES=t.stages, HELD=t.held, EARLY=t.early,
        num_warps=4, **({"launch_pdl": True} if t.early else {}),
    )  # fmt: skip
    return out
