"""The smallest parts of a network in training: float32 parameters, whatever type the products are computed in."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, out: bool = False) -> None:
        """`out`: writes into the residual stream, and starts smaller."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """RMS norm, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight
