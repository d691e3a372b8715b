"""MLP sublayers and the MTP layer's join; each part is in 16 or in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tripool.kernels.cuda.elementwise import normed
from tripool.kernels.cuda.make import AnyRows, Make, norm_for, rounding_for
from tripool.kernels.cuda.quantized_linear import Linear8
from tripool.kernels.weights import JoinWeights, MlpWeights, MoeWeights


class Join:
    """Norms two rows and projects their concatenation to one."""

    def __init__(self, make: Make, weights: JoinWeights) -> None:
        self._left, self._right = weights.left, weights.right
        self._linear = make.linear(weights.weight, None, weights.scales)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self._linear(torch.cat((normed(left, self._left), normed(right, self._right)), dim=1))


class Swiglu:
    def __init__(self, make: Make, weights: MlpWeights) -> None:
        self.gate_up = make.linear(weights.gate_up, weights.gate_up_bias, weights.gate_up_scales)
        self._down = make.linear(weights.down, weights.down_bias, weights.down_scales)
        self._gate: Callable[[torch.Tensor], AnyRows]
        self._gate = self._down.quantized.swiglu if isinstance(self._down, Linear8) else make.swiglu()
        self.num_bytes = self.gate_up.num_bytes + self._down.num_bytes

    def __call__(self, rows: AnyRows) -> torch.Tensor:
        return self._down(self._gate(self.gate_up(rows)))

    def add_to(self, x: torch.Tensor, rows: AnyRows) -> None:
        self._down.add_to(x, self._gate(self.gate_up(rows)))


class Mlp:
    """A dense SwiGLU."""

    def __init__(self, make: Make, weights: MlpWeights) -> None:
        self._swiglu = Swiglu(make, weights)
        self._norm = norm_for(weights.norm, self._swiglu.gate_up, fused=make.fused)
        self.num_bytes = self._swiglu.num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        self._swiglu.add_to(x, self._norm(x))


class MoeMlp:
    """Routed experts and an optional shared expert."""

    def __init__(self, make: Make, weights: MoeWeights) -> None:
        self._experts = make.experts(weights)
        self._shared = None if weights.shared is None else Swiglu(make, weights.shared)
        users = self._experts, *([] if self._shared is None else [self._shared.gate_up])
        self._router, self._rounded = make.router(weights, *users), rounding_for(*users)
        self.num_bytes = self._router.num_bytes + self._experts.num_bytes
        self.num_bytes += 0 if self._shared is None else self._shared.num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        rows, experts, weights = self._router(x)
        if isinstance(rows, torch.Tensor):
            rows = self._rounded(rows)
        shared = None if self._shared is None else self._shared(rows)
        self._experts(rows, experts, weights, onto=x, also=shared)
