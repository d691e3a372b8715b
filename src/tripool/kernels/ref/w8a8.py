"""8-bit rows and products in plain torch, as the CUDA kernels compute them: the oracle of `kernels/triton`.

A row of activations has one scale, a channel of weights has one scale; integer products are exact. (In `ref/int8`,
every 64 values share a scale.)
"""

from __future__ import annotations

import torch

from tripool.kernels.ref.norm import rms_norm
from tripool.kernels.ref.swiglu import swiglu

LEAST = 1e-10
"""Smallest row maximum: avoids a division by zero."""

Rows8 = tuple[torch.Tensor, torch.Tensor]
"""int8 [rows, width] and its float32 scales [rows]: value = integer * scale. In `ref/fp8` e4m3 instead."""


def quantise_rows(x: torch.Tensor) -> Rows8:
    """Quantise to 127 steps either way of the row's largest magnitude, ties to even."""
    x = x.float()
    largest = x.abs().amax(-1).clamp_min(LEAST)
    steps = (x * (127.0 / largest)[:, None]).round().clamp(-127, 127)
    return steps.to(torch.int8), largest / 127.0


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> Rows8:
    """Norm of `x`, or of `x + residual`, which is stored in `residual` rounded to its type."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    return quantise_rows(rms_norm(x.float(), weight.float(), eps))


def swiglu_quant(gate_up: torch.Tensor) -> Rows8:
    return quantise_rows(swiglu(gate_up.float()))


def int8_gemm(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x int8 [rows, in], w int8 [out, in], scales float32 [rows] and [out] -> bfloat16 [rows, out]."""
    total = (x.double() @ w.double().T).float()  # integers far below 2^53: exact in any order
    return (total * x_scale[:, None] * w_scale[None, :]).to(torch.bfloat16)


def grouped_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    starts: torch.Tensor, counts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Expert e multiplies rows [starts[e], starts[e] + counts[e]) with w[e]; other rows of the result are zeros."""
    out = torch.zeros(len(x), w.shape[1], dtype=torch.bfloat16, device=x.device)
    for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows = slice(start, start + count)
        out[rows] = int8_gemm(x[rows], x_scale[rows], w[expert], w_scale[expert])
    return out
