"""Products on the device, in the type that the table was made for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tripool.kernels.ref import linear
from tripool.kernels.weight_store import FRESH, WeightStore


class Linear(linear.Linear):
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        store: WeightStore = FRESH,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kept_bias = None if bias is None else store.keep("bias", lambda: bias.to(dtype))
        super().__init__(store.keep("weight", lambda: weight.to(dtype)), kept_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def first(self, count: int) -> Linear:
        return Linear(self.weight[:count], None if self.bias is None else self.bias[:count], dtype=self.weight.dtype)
