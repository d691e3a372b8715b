"""Routing: the experts of each token and their weights.

`score` is a softmax over all experts or independent sigmoids. A correction bias affects the choice, not the weight.
With groups, only experts of the best groups compete; a group's value is the sum of its `group_top` best scores.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoutePlan:
    top_k: int
    score: str  # "softmax" or "sigmoid"
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    normalise: bool = False
    scaling: float = 1.0


def route(logits: torch.Tensor, bias: torch.Tensor | None, plan: RoutePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, experts] -> experts [rows, top_k] int64 and weights [rows, top_k] float."""
    scores = logits.softmax(-1) if plan.score == "softmax" else logits.sigmoid()
    ranks = scores if bias is None else scores + bias
    if plan.groups > 1:
        grouped = ranks.unflatten(-1, (plan.groups, -1))
        worth = grouped.topk(plan.group_top, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(worth, dtype=torch.bool)
        chosen.scatter_(1, worth.topk(plan.top_groups, dim=-1).indices, True)
        ranks = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)
    experts = ranks.topk(plan.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if plan.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * plan.scaling
