"""Feed-forward sublayers as they are trained.

Every expert works on every token, as one wide SwiGLU, and what was not chosen is multiplied by zero before the way
down: the same sums as sending each token to its few experts, and the same gradients. It costs experts / top_k times the
routed operations (8 times for 32 experts, 4 chosen), and at widths of 64 it is still the faster form on a GPU: two
large products instead of 64 small ones, no sorting, no copies of rows, shapes that never change. The shared expert is
one more piece of the same wide product, let through in full.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tripool.kernels.ref.route import RoutePlan
from tripool.models.arch import Arch, MoeShape
from tripool.train.attention import Linear


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the last dimension are among its `count` largest; of equals, the earlier. By comparing each with each:
    for a few dozen that is one fused pass, where a sort is a kernel per call."""
    n = values.shape[-1]
    mine, other = values[..., :, None], values[..., None, :]
    earlier = torch.ones(n, n, dtype=torch.bool, device=values.device).tril(-1)
    ahead = (other > mine) | ((other == mine) & earlier)
    return ahead.sum(-1) < count


def gates(logits: torch.Tensor, bias: torch.Tensor, plan: RoutePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of every expert, 0 where it was not chosen, and who was: both [tokens, experts].

    What `tripool.kernels.ref.route` decides, in the form of a mask. Gradients go through the scores of the chosen; the
    bias only takes part in choosing and gets none.
    """
    scores = logits.sigmoid()
    ranks = scores.detach() + bias
    if plan.groups > 1:
        grouped = ranks.unflatten(-1, (plan.groups, -1))
        worth = grouped.masked_fill(~best(grouped, plan.group_top), 0.0).sum(-1)
        open_groups = best(worth, plan.top_groups)
        ranks = grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(-2)
    chosen = best(ranks, plan.top_k)
    weights = scores * chosen
    if plan.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * plan.scaling, chosen


class Dense(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * width)
        self.down = Linear(width, hidden, out=True)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up), x.new_zeros(0)


class Experts(nn.Module):
    """`gate_up` [2 * (experts * width + shared), hidden]: all gates, then all that they let through."""

    bias: torch.Tensor

    def __init__(self, arch: Arch, shape: MoeShape) -> None:
        super().__init__()
        assert shape.route.score == "sigmoid" and shape.correction_bias
        self.shape = shape
        self.router = Linear(arch.hidden, shape.experts)
        self.wide = shape.experts * shape.width
        total = self.wide + shape.shared_width
        self.gate_up = Linear(arch.hidden, 2 * total)
        self.down = Linear(total, arch.hidden, out=True)
        self.register_buffer("bias", torch.zeros(shape.experts))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`real`: bool [rows, row_tokens], tokens of documents. Also gives how many of them each expert got."""
        with torch.autocast(x.device.type, enabled=False):  # a decision: never rounded
            weights, chosen = gates(self.router(x.float()), self.bias, self.shape.route)
        gate, up = self.gate_up(x).chunk(2, -1)
        inner = F.silu(gate) * up
        through = weights.to(inner.dtype).repeat_interleave(self.shape.width, -1)
        shared = torch.ones_like(inner[..., self.wide :])
        out = self.down(inner * torch.cat((through, shared), -1))
        load = (chosen & real[..., None]).sum((0, 1), dtype=torch.float32)
        return out, load

    @torch.no_grad()
    def balance(self, load: torch.Tensor, rate: float) -> None:
        """Experts with more than their share become less likely to be chosen, whatever they are good at."""
        self.bias += rate * torch.sign(load.mean() - load)
