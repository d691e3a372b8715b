"""How the CUDA table makes its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tripool.kernels.cuda.elementwise import rms_norm
from tripool.kernels.cuda.experts import Experts
from tripool.kernels.cuda.linear import Linear
from tripool.kernels.cuda.quantized_linear import Experts8, Linear8, QuantizedOps
from tripool.kernels.ref import route
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.weight_store import WeightStore
from tripool.kernels.weights import MoeWeights, Norm

AnyRows = Any
"""Rows in the table's type, or `Rows8` where whoever multiplies them takes those: made for them, never looked into."""
AnyLinear = Linear | Linear8
AnyExperts = Experts | Experts8
Route = Callable[[torch.Tensor, torch.Tensor | None, RoutePlan], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Make:
    store: WeightStore
    dtype: torch.dtype
    fused: bool
    """Whether Triton kernels may be used: on CUDA, in bfloat16."""
    quantized: QuantizedOps | None = None
    """Who multiplies what the checkpoint holds in eight bits; None: it is multiplied out when it is loaded."""

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> AnyLinear:
        held = self.quantized.held(weight, scales) if self.quantized else None
        if self.quantized and held:
            return Linear8(held, bias, quantized=self.quantized, store=self.store)
        return Linear(weight, bias, store=self.store, dtype=self.dtype)

    def router(self, weight: torch.Tensor) -> Linear:
        """Its outcome is a decision: never rounded."""
        return Linear(weight, store=self.store, dtype=torch.float32)

    def route(self) -> Route:
        if not self.fused:
            return route.route
        from tripool.kernels.triton.gate import route as fused_route

        return fused_route

    def experts(self, weights: MoeWeights) -> AnyExperts:
        gate_up = self.quantized.held(weights.gate_up, weights.gate_up_scales) if self.quantized else None
        down = self.quantized.held(weights.down, weights.down_scales) if self.quantized else None
        if self.quantized and gate_up and down:
            return Experts8(gate_up, down, quantized=self.quantized, store=self.store)
        return Experts(weights.gate_up, weights.down, store=self.store, dtype=self.dtype, fused=self.fused)


def norm_for(norm: Norm, *users: AnyLinear | AnyExperts) -> Callable[[torch.Tensor], AnyRows]:
    """The norm of rows for who multiplies them next: in eight bits at once if all of them round."""
    quantized = _common(users)
    if quantized is None:
        return lambda x: rms_norm(x, norm.gain, norm.eps)
    return lambda x: quantized.norm(x, norm.gain, norm.eps)


def rounding_for(*users: AnyLinear | AnyExperts) -> Callable[[torch.Tensor], AnyRows]:
    """Rows that are needed in floats too, for who multiplies them next: rounded once instead of by each."""
    quantized = _common(users)
    return (lambda x: x) if quantized is None else quantized.quantise


def _common(users: tuple[AnyLinear | AnyExperts, ...]) -> QuantizedOps | None:
    quantized_ops = [one.quantized for one in users if isinstance(one, Linear8 | Experts8)]
    return quantized_ops[0] if len(quantized_ops) == len(users) else None
