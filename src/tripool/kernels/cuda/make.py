"""How the CUDA table makes its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tripool.kernels.cuda.eight import Eight, Experts8, Linear8
from tripool.kernels.cuda.elementwise import rms_norm
from tripool.kernels.cuda.experts import Experts
from tripool.kernels.cuda.linear import Linear
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
    eight: Eight | None = None
    """Who multiplies what the checkpoint holds in eight bits; None: it is multiplied out when it is loaded."""

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> AnyLinear:
        held = self.eight.held(weight, scales) if self.eight else None
        if self.eight and held:
            return Linear8(held, bias, eight=self.eight, store=self.store)
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
        gate_up = self.eight.held(weights.gate_up, weights.gate_up_scales) if self.eight else None
        down = self.eight.held(weights.down, weights.down_scales) if self.eight else None
        if self.eight and gate_up and down:
            return Experts8(gate_up, down, eight=self.eight, store=self.store)
        return Experts(weights.gate_up, weights.down, store=self.store, dtype=self.dtype, fused=self.fused)


def norm_for(norm: Norm, *users: AnyLinear | AnyExperts) -> Callable[[torch.Tensor], AnyRows]:
    """The norm of rows for who multiplies them next: in eight bits at once if all of them round."""
    eight = _common(users)
    if eight is None:
        return lambda x: rms_norm(x, norm.gain, norm.eps)
    return lambda x: eight.norm(x, norm.gain, norm.eps)


def rounding_for(*users: AnyLinear | AnyExperts) -> Callable[[torch.Tensor], AnyRows]:
    """Rows that are needed in floats too, for who multiplies them next: rounded once instead of by each."""
    eight = _common(users)
    return (lambda x: x) if eight is None else eight.quantise


def _common(users: tuple[AnyLinear | AnyExperts, ...]) -> Eight | None:
    eights = [one.eight for one in users if isinstance(one, Linear8 | Experts8)]
    return eights[0] if len(eights) == len(users) else None
