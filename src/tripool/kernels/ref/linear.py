"""y = x W^T + b. A table's `linear` packs the weight once and returns the op."""

from __future__ import annotations

import torch


class Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias

    def first(self, count: int) -> Linear:
        return type(self)(self.weight[:count], None if self.bias is None else self.bias[:count])

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
