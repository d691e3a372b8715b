"""The feed-forward half of a layer: one dense SwiGLU, or a shared one beside routed experts."""

from __future__ import annotations

import torch

from tripool.kernels.table import MlpSublayer
from tripool.kernels.weights import MlpWeights, MoeWeights, Norm
from tripool.models.arch import Arch, MoeShape
from tripool.models.loader import Loader


def dense_mlp(loader: Loader, prefix: str, norm: Norm, arch: Arch) -> MlpSublayer:
    weights = _swiglu(loader, prefix, norm, arch.hidden, arch.dense_width, bias=arch.mlp_bias)
    return loader.counted(loader.kernels.mlp(weights))


def expert_mlp(loader: Loader, prefix: str, norm: Norm, arch: Arch, shape: MoeShape) -> MlpSublayer:
    gate_bias = None
    if shape.correction_bias:
        # Part of a decision, and often large beside its differences: in bfloat16 many of them would be one.
        gate_bias = loader.tensor(f"{prefix}.gate.e_score_correction_bias", shape.experts, dtype=torch.float32)
    shared = None
    if shape.shared_width:
        name = f"{prefix}.shared_experts"
        shared = _swiglu(loader, name, norm, arch.hidden, shape.shared_width, bias=arch.mlp_bias)
    experts = (f"{prefix}.experts", shape.experts, shape.width, arch.hidden)
    gate_up, down = loader.experts(*experts)
    gate_up_scales, down_scales = loader.expert_scales(*experts)
    weights = MoeWeights(
        norm=norm,
        gate=loader.fused([f"{prefix}.gate"], [shape.experts], arch.hidden),
        gate_bias=gate_bias,
        gate_up=gate_up,
        down=down,
        shared=shared,
        plan=shape.route,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
    )
    return loader.counted(loader.kernels.moe(weights))


def _swiglu(loader: Loader, prefix: str, norm: Norm, hidden: int, width: int, *, bias: bool) -> MlpWeights:
    names, down = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [f"{prefix}.down_proj"]
    return MlpWeights(
        norm=norm,
        gate_up=loader.fused(names, [width, width], hidden),
        gate_up_bias=loader.bias(names, [width, width]) if bias else None,
        down=loader.fused(down, [hidden], width),
        down_bias=loader.bias(down, [hidden]) if bias else None,
        gate_up_scales=loader.scales(names, [width, width]),
        down_scales=loader.scales(down, [hidden]),
    )
