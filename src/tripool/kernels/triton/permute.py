"""Permutes rows to their experts and back on CUDA: a counting sort of the choices, copies of rows, and the weighted
sum.

The sort is stable and needs nothing from the host: counts per chunk of choices, a running sum over chunks for each
expert, and slots within the chunk. Choices of experts that are not on this rank get no slot (-1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tripool.kernels.ref.permute import ExpertOrder

CHUNK = 128


@triton.jit
def _local(experts, chunk, num_choices, first, count, CHUNK: tl.constexpr):
    """This chunk's choices relative to the first local expert; `count` for those that are not local."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    local = tl.load(experts + at, mask=at < num_choices, other=-1).to(tl.int32) - first
    return at, tl.where((at < num_choices) & (local >= 0) & (local < count), local, count)


@triton.jit(do_not_specialize=["num_choices", "first", "chunks"])
def count_kernel(experts, by_chunk, num_choices, first, count, chunks, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr):
    chunk = tl.program_id(0)
    _, local = _local(experts, chunk, num_choices, first, count, CHUNK)
    every = tl.arange(0, BLOCK_E)
    here = tl.sum((local[:, None] == every[None, :]).to(tl.int32), axis=0)
    tl.store(by_chunk + every * chunks + chunk, here, mask=every < count)


@triton.jit(do_not_specialize=["chunks"])
def running_sum_kernel(by_chunk, totals, chunks, BLOCK: tl.constexpr):
    """For each expert: the number of its choices in earlier chunks, in place, and in total."""
    expert = tl.program_id(0)
    total = 0
    for block in range(tl.cdiv(chunks, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        here = tl.load(by_chunk + expert * chunks + at, mask=at < chunks, other=0)
        tl.store(by_chunk + expert * chunks + at, total + tl.cumsum(here, axis=0) - here, mask=at < chunks)
        total += tl.sum(here, axis=0)
    tl.store(totals + expert, total)


@triton.jit(do_not_specialize=["num_choices", "first", "chunks"])
def place_kernel(
    experts, by_chunk, totals, slots, starts, num_choices, first, count, chunks,
    CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    at, local = _local(experts, chunk, num_choices, first, count, CHUNK)
    every = tl.arange(0, BLOCK_E)
    sizes = tl.load(totals + every, mask=every < count, other=0)
    ends = tl.cumsum(sizes, axis=0)
    if chunk == 0:
        tl.store(starts + every, ends - sizes, mask=every < count)
        tl.store(starts + count, tl.sum(sizes, axis=0))
    base = ends - sizes + tl.load(by_chunk + every * chunks + chunk, mask=every < count, other=0)
    mine = tl.sum(tl.where(local[:, None] == every[None, :], base[None, :], 0), axis=1)
    order = tl.arange(0, CHUNK)
    _, others = _local(experts, chunk, num_choices, first, count, CHUNK)
    earlier = (order[None, :] < order[:, None]) & (others[None, :] == local[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(slots + at, tl.where(local < count, mine + rank, -1), mask=at < num_choices)


@triton.jit
def permute_kernel(x, x_scale, slots, out, out_scale, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: read once, written once per slot."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    v = tl.load(x + row * width + cols, mask=cols < width)
    scale = tl.load(x_scale + row)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slots + row * TOP_K + choice).to(tl.int64)
        if slot >= 0:
            tl.store(out + slot * width + cols, v, mask=cols < width)
            tl.store(out_scale + slot, scale)


@triton.jit
def sum_kernel(
    y, weights, slots, out, also, width,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr, ONTO: tl.constexpr, ALSO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and part of its columns. A slot of -1 adds nothing."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = row * TOP_K + choice
        if SORTED:
            slot = tl.load(slots + slot).to(tl.int64)
        weight = tl.load(weights + row * TOP_K + choice)
        part = tl.load(y + slot * width + cols, mask=(cols < width) & (slot >= 0), other=0.0)
        total += part.to(tl.float32) * weight
    if ALSO:
        total += tl.load(also + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    if ONTO:
        total += tl.load(out + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, total.to(out.dtype.element_ty), mask=cols < width)


def sort_by_expert(experts: torch.Tensor, count: int, first: int = 0) -> ExpertOrder:
    """experts int32 or int64 [rows, top_k], contiguous."""
    assert experts.is_contiguous()
    choices = experts.numel()
    chunks, block_e = max(1, -(-choices // CHUNK)), triton.next_power_of_2(count)
    by_chunk = torch.empty(count, chunks, dtype=torch.int32, device=experts.device)
    totals = torch.empty(count, dtype=torch.int32, device=experts.device)
    slots = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    count_kernel[(chunks,)](experts, by_chunk, choices, first, count, chunks, CHUNK=CHUNK, BLOCK_E=block_e)
    running_sum_kernel[(count,)](by_chunk, totals, chunks, BLOCK=1024)
    place_kernel[(chunks,)](
        experts, by_chunk, totals, slots, starts, choices, first, count, chunks, CHUNK=CHUNK, BLOCK_E=block_e
    )
    return ExpertOrder(slots, starts)


def permute(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    expert_order: ExpertOrder,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and scales -> buffers of rows * top_k; what is past the last slot is left unchanged."""
    (rows, width), top_k = x.shape, expert_order.slots.shape[1]
    assert x.is_contiguous() and len(expert_order.slots) == rows
    if out is None:
        sorted_x = torch.empty(rows * top_k, width, dtype=x.dtype, device=x.device)
        out = sorted_x, torch.empty(rows * top_k, dtype=x_scale.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        permute_kernel[(rows,)](
            x,
            x_scale,
            expert_order.slots,
            *out,
            width,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
    return out


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, expert_order: ExpertOrder, onto: torch.Tensor | None = None,
    also: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Weighted sum of each row's results, in float32 in the order of its choices; returned in y's type.

    `also` [rows, width] is one more term. With `onto` [rows, width] the sum is added to it in place.
    """
    return _sum(y, weights, expert_order.slots, onto, also)


def sum_choices(
    parts: torch.Tensor, weights: torch.Tensor, onto: torch.Tensor | None = None, also: torch.Tensor | None = None
) -> torch.Tensor:
    """`unpermute` of parts [rows, top_k, width] that are in the order of choices."""
    return _sum(parts.flatten(0, 1), weights, None, onto, also)


def _sum(
    y: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor | None, onto: torch.Tensor | None,
    also: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    (rows, top_k), width = weights.shape, y.shape[1]
    assert slots is None or slots.shape == weights.shape
    out = y.new_empty(rows, width) if onto is None else onto
    assert out.shape == (rows, width) and (also is None or (also.shape == out.shape and also.is_contiguous()))
    assert y.is_contiguous() and weights.is_contiguous() and out.is_contiguous()
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        sum_kernel[(rows, -(-width // block))](
            y, weights, weights if slots is None else slots, out, out if also is None else also, width,
            TOP_K=top_k, BLOCK=block, SORTED=slots is not None, ONTO=onto is not None, ALSO=also is not None,
            EARLY=y.is_cuda, num_warps=max(1, block // 256), **({"launch_pdl": True} if y.is_cuda else {}),
        )  # fmt: skip
    return out
