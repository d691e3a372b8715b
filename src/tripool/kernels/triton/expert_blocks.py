"""Lists (row, choice) pairs by expert, in blocks of equal height, on CUDA: nothing is read by the host.

One launch for up to `MOST_PAIRS`: a program per expert counts all choices, so it knows where its own pairs and blocks
start without waiting for another program. Pairs keep their order within an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tripool.kernels.ref.permute import ExpertOrder
from tripool.kernels.triton.grouped_gemm import Plan, make_plan, plan_blocks
from tripool.kernels.triton.permute import sort_by_expert
from tripool.kernels.triton.tilings import Narrow, Wide

CHUNK = 1024
MOST_PAIRS = 16384
"""For more, programs that share the count are the faster way (`permute.sort_by_expert`)."""


@triton.jit(do_not_specialize=["num_pairs"])
def expert_blocks_kernel(
    experts, pairs, slots, starts, blocks, num_blocks, num_pairs, num_experts,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_E exceeds the number of experts: the bin after the last expert counts what is past the last pair."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(experts + at, mask=at < num_pairs, other=num_experts).to(tl.int32), BLOCK_E)
    counts = tl.where(every < num_experts, counts, 0)
    heights = tl.cdiv(counts, BLOCK_M)
    count = tl.sum(tl.where(every == expert, counts, 0), axis=0)
    start = tl.sum(tl.where(every < expert, counts, 0), axis=0)
    block = tl.sum(tl.where(every < expert, heights, 0), axis=0)
    tl.store(starts + expert, start)
    if expert == 0:
        tl.store(starts + num_experts, num_pairs)
        tl.store(num_blocks, tl.sum(heights, axis=0))
    for index in range(tl.cdiv(count, BLOCK_M)):
        here = blocks + 3 * (block + index)
        tl.store(here, expert)
        tl.store(here + 1, start + index * BLOCK_M)
        tl.store(here + 2, start + count)
    if count > 0:
        for first in range(0, num_pairs, CHUNK):
            at = first + tl.arange(0, CHUNK)
            mine = (tl.load(experts + at, mask=at < num_pairs, other=num_experts).to(tl.int32) == expert).to(tl.int32)
            slot = start + tl.cumsum(mine, axis=0) - 1
            tl.store(pairs + slot, at, mask=mine > 0)
            tl.store(slots + at, slot, mask=mine > 0)
            start += tl.sum(mine, axis=0)


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """pairs: int32 [pairs], sorted by expert: `row * top_k + choice`. blocks: int32 [at most, 3] of (expert, first
    place in `pairs`, the expert's stop); their number is on the device. order: the inverse of `pairs`."""

    pairs: torch.Tensor
    order: ExpertOrder
    blocks: torch.Tensor
    num_blocks: torch.Tensor


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks if as many experts as possible have one pair and the last one has the rest."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // block_m


def expert_blocks(experts: torch.Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """experts int32 or int64 [rows, top_k], contiguous, at least one row."""
    assert experts.is_contiguous() and experts.numel()
    if experts.numel() > MOST_PAIRS:
        return _sorted_blocks(experts, num_experts, block_m)
    count, device, early = experts.numel(), experts.device, experts.is_cuda
    pairs, slots = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (count, experts.shape))
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    blocks = torch.empty(most_blocks(count, num_experts, block_m), 3, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    expert_blocks_kernel[(num_experts,)](
        experts, pairs, slots, starts, blocks, num_blocks, count, num_experts, BLOCK_M=block_m,
        CHUNK=min(CHUNK, max(128, triton.next_power_of_2(count))), BLOCK_E=triton.next_power_of_2(num_experts + 1),
        EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return ExpertBlocks(pairs, ExpertOrder(slots, starts), blocks, num_blocks)


def _sorted_blocks(experts: torch.Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """The same in several launches, with the count shared between programs."""
    order, count = sort_by_expert(experts, num_experts), experts.numel()
    every = torch.arange(count, dtype=torch.int32, device=experts.device)
    pairs = torch.empty_like(every).scatter_(0, order.slots.flatten().long(), every)
    return ExpertBlocks(pairs, order, *plan_blocks(order.starts, order.starts.diff(), count, block_m))


def sort_and_plan(experts: torch.Tensor, num_experts: int, tiling: Narrow | Wide) -> tuple[ExpertOrder, Plan]:
    """Order and plan for `permute` and `grouped_gemm`; experts as above, of any number of rows."""
    if not 0 < experts.numel() <= MOST_PAIRS:
        order = sort_by_expert(experts, num_experts)
        return order, make_plan(order.starts, order.starts.diff(), experts.numel(), tiling)
    found = expert_blocks(experts, num_experts, tiling.block_m)
    return found.order, Plan(found.blocks, found.num_blocks, tiling)
