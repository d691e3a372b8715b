"""The feed-forward half of a layer: one dense SwiGLU, or a shared one beside routed experts."""

from __future__ import annotations

import torch

from tripool.models.arch import Arch, MoeShape
from tripool.models.loader import Loader


class DenseMlp:
    def __init__(self, loader: Loader, prefix: str, hidden: int, width: int, *, bias: bool) -> None:
        self._k = loader.kernels
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = loader.linear(names, [width, width], hidden, bias=bias)
        self._down = loader.linear([f"{prefix}.down_proj"], [hidden], width, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._k.swiglu(self._gate_up(x)))


class ExpertMlp:
    def __init__(self, loader: Loader, prefix: str, arch: Arch, shape: MoeShape) -> None:
        self._k, self._plan = loader.kernels, shape.route
        self._gate = loader.kernels.router(loader.tensor(f"{prefix}.gate.weight", shape.experts, arch.hidden))
        self._bias: torch.Tensor | None = None
        if shape.correction_bias:
            self._bias = loader.tensor(f"{prefix}.gate.e_score_correction_bias", shape.experts)
        self._experts = loader.experts(f"{prefix}.experts", shape.experts, shape.width, arch.hidden)
        self._shared: DenseMlp | None = None
        if shape.shared_width:
            name = f"{prefix}.shared_experts"
            self._shared = DenseMlp(loader, name, arch.hidden, shape.shared_width, bias=arch.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        experts, weights = self._k.route(self._gate(x), self._bias, self._plan)
        routed = self._experts(x, experts, weights)
        return routed if self._shared is None else routed + self._shared(x)
