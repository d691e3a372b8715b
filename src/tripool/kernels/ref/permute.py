"""Permutes rows to their chosen experts and back, in plain torch: the oracle of `kernels/triton/permute`.

Choices of experts outside [first, first + count) belong to another rank and get no slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Slot of each choice among the rows sorted by expert; choices keep their order within an expert."""

    slots: torch.Tensor  # int32 [rows, top_k]; -1: not here
    starts: torch.Tensor  # int32 [experts + 1]; the last one is the number of slots


def sort_by_expert(experts: torch.Tensor, count: int, first: int = 0) -> ExpertOrder:
    """experts [rows, top_k]."""
    local = experts.flatten().long() - first
    local = torch.where((local >= 0) & (local < count), local, count)
    starts = torch.zeros(count + 1, dtype=torch.int64, device=experts.device)
    starts[1:] = torch.bincount(local, minlength=count + 1)[:count].cumsum(0)
    slots = torch.empty_like(local)
    slots[local.argsort(stable=True)] = torch.arange(len(local), device=experts.device)
    slots[local == count] = -1
    return ExpertOrder(slots.view(experts.shape).to(torch.int32), starts.to(torch.int32))


def permute(x: torch.Tensor, x_scale: torch.Tensor, expert_order: ExpertOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and their scales, one copy per slot; slots past the last one hold zeros."""
    rows, top_k = expert_order.slots.shape
    sorted_x = torch.zeros(rows * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    sorted_scale = torch.zeros(rows * top_k, dtype=x_scale.dtype, device=x.device)
    row, choice = torch.where(expert_order.slots >= 0)
    slots = expert_order.slots[row, choice].long()
    sorted_x[slots], sorted_scale[slots] = x[row], x_scale[row]
    return sorted_x, sorted_scale


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, expert_order: ExpertOrder, onto: torch.Tensor | None = None,
    also: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Weighted sum of each row's results, in float32 in the order of its choices; returned in y's type.

    `also` [rows, width] is one more term. With `onto` [rows, width] the sum is added to it in place.
    """
    total = torch.zeros(len(weights), y.shape[1], dtype=torch.float32, device=y.device)
    for choice, slots in enumerate(expert_order.slots.long().T):
        here = slots >= 0
        total[here] += y[slots[here]].float() * weights[here, choice, None]
    if also is not None:
        total += also.float()
    return total.to(y.dtype) if onto is None else onto.copy_(total + onto.float())
