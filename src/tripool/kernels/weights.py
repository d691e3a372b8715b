"""Weights of a layer, by sublayer, as the checkpoint has them: the input of a kernel table's packing.

If the checkpoint holds the 8-bit type that the table uses, fields ending in `scales` hold the scale of each row; for
e4m3 they have one more dimension, the blocks of a row's columns (0: stored as floats). The floats beside them are the
dequantised values, so a table that computes in floats can ignore the scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan

INT8, E4M3 = "I8", "F8_E4M3"
"""The two 8-bit types, as checkpoints name them."""


@dataclass(frozen=True, slots=True)
class Norm:
    gain: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWeights:
    """Weights that join two normed rows: the input of the MTP layer."""

    left: Norm
    right: Norm
    weight: torch.Tensor
    """[hidden, 2 * hidden]."""
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaWeights:
    norm: Norm
    qkv: torch.Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qkv_scales: torch.Tensor | None = None
    out_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    norm: Norm
    down: torch.Tensor
    """[q_rank + kv_rank + rope, hidden]; without the first part when queries have no low rank."""
    down_bias: torch.Tensor | None
    q_norm: Norm | None
    kv_norm: Norm
    core: MlaWeights
    down_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    norm: Norm
    gate_up: torch.Tensor
    """[2 * width, hidden]: gate rows, then up rows."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    norm: Norm
    gate: torch.Tensor
    """[experts, hidden]."""
    gate_bias: torch.Tensor | None
    """[experts]: affects the choice, not the weight."""
    gate_up: torch.Tensor
    """[experts, 2 * width, hidden]."""
    down: torch.Tensor
    """[experts, hidden, width]."""
    shared: MlpWeights | None
    """Runs on every token. Its norm is this layer's own."""
    plan: RoutePlan
    gate_up_scales: torch.Tensor | None = None
    """[experts, 2 * width]."""
    down_scales: torch.Tensor | None = None
    """[experts, hidden]."""
