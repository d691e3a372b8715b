"""Grouped int8 product on CUDA: each expert's rows with that expert's weights, with row counts known on the device
only.

`starts` and `counts` give the rows of each expert. Contiguous (rows sorted by expert): starts are the offsets of the
sort. Masked (a buffer of fixed height per expert, for decoding): starts are multiples of that height. A small kernel
turns them into a plan, a list of row blocks with their expert, which the product kernels walk: no tile is spent on an
expert without rows, and the host never waits for a count. One plan serves all products over the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tripool.kernels.triton.int8_gemm import launch_narrow
from tripool.kernels.triton.tilings import NUM_SMS, Narrow, Wide


@triton.jit
def plan_kernel(starts, counts, plan, num_blocks, experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """One program per expert: its first block follows from the counts of all experts."""
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    blocks = tl.cdiv(tl.load(counts + every, mask=every < experts, other=0), BLOCK_M)
    before = tl.sum(tl.where(every < expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    start, count = tl.load(starts + expert), tl.load(counts + expert)
    for block in range(tl.cdiv(count, BLOCK_M)):
        at = plan + 3 * (before + block)
        tl.store(at, expert)
        tl.store(at + 1, start + block * BLOCK_M)
        tl.store(at + 2, start + count)


@dataclass(frozen=True, slots=True)
class Plan:
    """blocks: int32 [at most, 3] of (expert, first row, stop row); their number is on the device."""

    blocks: torch.Tensor
    num_blocks: torch.Tensor
    tiling: Narrow | Wide


def choose_grouped(rows_per_expert: int, n: int, k: int, experts: int) -> Narrow | Wide:
    """Chosen by the expected rows per expert; other counts cost time, never correctness."""
    if rows_per_expert > 256:
        return Wide()
    block_m = 16
    while block_m < min(rows_per_expert, 128):
        block_m *= 2
    block_n, block_k = (64, 256) if block_m <= 64 else (128, 128)
    tiles = experts * -(-rows_per_expert // block_m) * -(-n // block_n)
    splits = max(1, min(2 * NUM_SMS // tiles, k // (4 * block_k), 8))
    return Narrow(block_m, block_n, block_k, splits)


def make_plan(starts: torch.Tensor, counts: torch.Tensor, num_rows: int, tiling: Narrow | Wide) -> Plan:
    return Plan(*plan_blocks(starts, counts, num_rows, tiling.block_m), tiling)


def plan_blocks(
    starts: torch.Tensor, counts: torch.Tensor, num_rows: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """starts and counts int32 [experts] on the device; `num_rows` bounds the sum of counts."""
    experts = len(counts)
    at_most = -(-num_rows // height) + experts
    blocks = torch.empty(at_most, 3, dtype=torch.int32, device=counts.device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=counts.device)
    plan_kernel[(experts,)](
        starts,
        counts,
        blocks,
        num_blocks,
        experts,
        BLOCK_M=height,
        BLOCK_E=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return blocks, num_blocks


def grouped_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, plan: Plan,
    out: torch.Tensor | None = None, arrived: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x int8 [rows, k], w int8 [experts, n, k], scales float32 [rows] and [experts, n] -> bfloat16 [rows, n].

    Rows without an expert are left unchanged. k is a multiple of 16.
    """
    (rows, k), n = x.shape, w.shape[1]
    assert w.shape[2] == k and w_scale.shape == w.shape[:2] and x_scale.shape == (rows,) and k % 16 == 0
    assert x.dtype == w.dtype == torch.int8 and x.is_contiguous() and w.is_contiguous()
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    assert out.shape == (rows, n) and out.is_contiguous()
    if rows == 0:
        return out
    t, where = plan.tiling, (plan.blocks, plan.num_blocks)
    if isinstance(t, Narrow):
        return launch_narrow(x, x_scale, w, w_scale, out, arrived, t, len(plan.blocks), *where)
    assert n % 8 == 0  # rows of the result start at 16 bytes
    if x.is_cuda:
        from tripool.kernels.triton.wide import launch_wide

        return launch_wide(x, x_scale, w, w_scale, out, t, *where)
    return launch_narrow(x, x_scale, w, w_scale, out, arrived, Narrow(t.block_m, 64, 128), len(plan.blocks), *where)
