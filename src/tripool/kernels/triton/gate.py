"""Routing on CUDA: `ref/route` in one kernel, one warp per row.

Ties go to the expert with the lower number; `ref/route` leaves them unspecified.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tripool.kernels.ref.route import RoutePlan


@triton.jit(do_not_specialize=["rows"])  # a layout by the number of rows could change the order of sums
def route_kernel(
    logits, bias, experts, weights, per_group, scaling, stride, rows, PARTS: tl.constexpr,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Scores are laid out as groups x members, both padded to powers of two; padding ranks last."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_P)[None, :]
    number = group * per_group + member
    real = (group < GROUPS) & (member < per_group)
    scores = tl.load(logits + row * stride + number, mask=real, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        scores += tl.load(logits + part * rows * stride + row * stride + number, mask=real, other=0.0)
    if SIGMOID:
        scores = tl.sigmoid(scores)
    else:
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    ranks = scores
    if BIASED:
        ranks += tl.load(bias + number, mask=real, other=0.0).to(tl.float32)
    ranks = tl.where(real, ranks, float("-inf"))
    if GROUPS > 1:
        left, worth = ranks, tl.zeros((BLOCK_G,), dtype=tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            worth += tl.max(left, axis=1)
            best = tl.argmax(left, axis=1)
            left = tl.where(member == best[:, None], float("-inf"), left)
        lines = tl.arange(0, BLOCK_G)
        chosen = tl.zeros((BLOCK_G,), dtype=tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(worth, axis=0)
            chosen = tl.where(lines == best_group, 1, chosen)
            worth = tl.where(lines == best_group, float("-inf"), worth)
        ranks = tl.where(chosen[:, None] > 0, ranks, float("-inf"))
    flat, flat_scores = tl.reshape(ranks, (BLOCK_G * BLOCK_P,)), tl.reshape(scores, (BLOCK_G * BLOCK_P,))
    candidates, order = tl.arange(0, BLOCK_G * BLOCK_P), tl.arange(0, BLOCK_K)
    picked, weight = tl.zeros((BLOCK_K,), dtype=tl.int32), tl.zeros((BLOCK_K,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.argmax(flat, axis=0)
        score = tl.sum(tl.where(candidates == best, flat_scores, 0.0))
        picked = tl.where(order == choice, best // BLOCK_P * per_group + best % BLOCK_P, picked)
        weight = tl.where(order == choice, score, weight)
        flat = tl.where(candidates == best, float("-inf"), flat)
    if NORMALISE:
        weight = weight / (tl.sum(weight) + 1e-20)
    tl.store(experts + row * TOP_K + order, picked, mask=order < TOP_K)
    tl.store(weights + row * TOP_K + order, weight * scaling, mask=order < TOP_K)


def route(logits: torch.Tensor, bias: torch.Tensor | None, plan: RoutePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, experts] -> experts int32 and weights float32 [rows, top_k], best first."""
    return route_parts(logits[None], bias, plan)


def route_parts(logits: torch.Tensor, bias: torch.Tensor | None, plan: RoutePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of the sum of float32 logits [parts, rows, experts], contiguous, added in order."""
    early = logits.is_cuda
    parts, rows, num_experts = logits.shape
    assert logits.stride(2) == 1 and num_experts % plan.groups == 0
    assert parts == 1 or logits.is_contiguous()
    experts = torch.empty(rows, plan.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, plan.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        per_group = num_experts // plan.groups
        route_kernel[(rows,)](
            logits, logits if bias is None else bias, experts, weights, per_group, plan.scaling,
            logits.stride(1) if parts == 1 else num_experts, rows, PARTS=parts, TOP_K=plan.top_k, GROUPS=plan.groups,
            TOP_GROUPS=plan.top_groups, GROUP_TOP=plan.group_top, SIGMOID=plan.score == "sigmoid",
            BIASED=bias is not None, NORMALISE=plan.normalise, BLOCK_G=triton.next_power_of_2(plan.groups),
            BLOCK_P=triton.next_power_of_2(per_group), BLOCK_K=triton.next_power_of_2(plan.top_k), EARLY=early,
            num_warps=1, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return experts, weights
