"""Linear layers with batch-invariant products, for the exact mode: see `triton/invariant_gemm`.

Imports Triton only when a product runs: the table is also made on machines without it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch

from tripool.errors import NotExact
from tripool.kernels.ref import linear
from tripool.kernels.weight_store import FRESH, WeightStore

_WIDTH_MULTIPLE = 8
_MOST_TILES = 4096
"""Of a product whose depth is split: such weights have few channels."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """Batch-invariant products of one device, whose streams run one after the other."""

    arrived: torch.Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> Invariant:
        return cls(torch.zeros(_MOST_TILES, dtype=torch.int32, device=device))

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, store: WeightStore, dtype: torch.dtype
    ) -> InvariantLinear:
        return InvariantLinear(weight, bias, invariant=self, store=store, dtype=dtype)

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        onto: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [rows, in], weight [out, in] -> [rows, out] in `dtype`, added to `onto` if it is given."""
        from tripool.kernels.triton.invariant_gemm import invariant_gemm

        return invariant_gemm(
            x, weight, bias, out=onto, add=onto is not None, arrived=self.arrived, dtype=dtype or x.dtype
        )

    def by_head(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        from tripool.kernels.triton.invariant_gemm import invariant_bmm

        invariant_bmm(x, w, out)


class InvariantLinear(linear.Linear):
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        invariant: Invariant,
        store: WeightStore = FRESH,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_width(weight.shape[1])
        kept_bias = None if bias is None else store.keep("bias", lambda: bias.to(dtype))
        super().__init__(store.keep("weight", lambda: weight.to(dtype)), kept_bias)
        self._invariant = invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._invariant.product(x.to(self.weight.dtype), self.weight, self.bias)

    def add_to(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """x += self(rows), rounded once."""
        assert x.is_contiguous() and x.dtype == self.weight.dtype
        self._invariant.product(rows.to(self.weight.dtype), self.weight, self.bias, onto=x)

    def first(self, count: int) -> InvariantLinear:
        part = copy(self)
        part.weight, part.bias = self.weight[:count], None if self.bias is None else self.bias[:count]
        return part


def check_width(width: int) -> None:
    if width % _WIDTH_MULTIPLE:
        message = f"the exact mode has no product for rows of {width} columns"
        raise NotExact(message, hint=f"it takes multiples of {_WIDTH_MULTIPLE}; serve this model without --exact")
