"""Rows and products in e4m3 in plain torch: the oracle of `kernels/triton`'s quantisation and torch's scaled products.

A row of activations has one scale, a channel of weights has one scale; see `ref/w8a8` for the same with integers.
"""

from __future__ import annotations

import torch

from tripool.kernels.ref.norm import rms_norm
from tripool.kernels.ref.swiglu import swiglu
from tripool.kernels.ref.w8a8 import LEAST, Rows8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest e4m3 value; the type has no infinity."""


def quantise_rows(x: torch.Tensor) -> Rows8:
    """Scale each row so that its largest magnitude becomes the largest e4m3 value."""
    x = x.float()
    largest = x.abs().amax(-1).clamp_min(LEAST)
    return (x * (LARGEST / largest)[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), largest / LARGEST


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Rows8:
    return quantise_rows(rms_norm(x.float(), weight.float(), eps))


def swiglu_quant(gate_up: torch.Tensor) -> Rows8:
    return quantise_rows(swiglu(gate_up.float()))


def gemm(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x e4m3 [rows, in], w e4m3 [out, in], scales float32 [rows] and [out] -> bfloat16 [rows, out]."""
    total = (x.double() @ w.double().T).float()
    return (total * x_scale[:, None] * w_scale[None, :]).to(torch.bfloat16)
