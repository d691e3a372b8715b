"""Rows and products in e4m3 by blocks, as DeepSeek stores them, in plain torch: the oracle of `kernels/triton`.

A row of activations has one scale for each 128 columns. Weights have one for each 128 x 128; `Rows8` of weights holds
them as [ceil(out / rows), ceil(in / 128)], where `rows` consecutive rows share scales: 128, or less where matrices were
stacked whose heights are no multiples of 128 (`share_rows`). Edge blocks may be smaller.
"""

from __future__ import annotations

import torch

from tripool.kernels.ref.norm import rms_norm
from tripool.kernels.ref.swiglu import swiglu
from tripool.kernels.ref.w8a8 import LEAST, Rows8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest e4m3 value; the type has no infinity."""
GROUP = 128
"""Columns that share a scale."""


def quantise_rows(x: torch.Tensor) -> Rows8:
    """Scale every 128 columns of a row so that their largest magnitude becomes the largest e4m3 value."""
    rows, width = x.shape
    groups = -(-width // GROUP)
    padded = x.new_zeros(rows, groups * GROUP, dtype=torch.float32)
    padded[:, :width] = x
    largest = padded.view(rows, groups, GROUP).abs().amax(-1).clamp_min(LEAST)
    steps = x.float() * by_column(LARGEST / largest, width)
    return steps.clamp(-LARGEST, LARGEST).to(E4M3), largest / LARGEST


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Rows8:
    return quantise_rows(rms_norm(x.float(), weight.float(), eps))


def swiglu_quant(gate_up: torch.Tensor) -> Rows8:
    return quantise_rows(swiglu(gate_up.float()))


def by_column(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Scales [..., groups] -> [..., width]."""
    return scales.repeat_interleave(GROUP, -1)[..., :width]


def share_rows(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., rows, groups] of every row -> those of as many rows as share them everywhere, at most 128."""
    rows, share = scales.shape[-2], GROUP
    while share > 1 and not torch.equal(scales, _first_of(scales, share).repeat_interleave(share, -2)[..., :rows, :]):
        share //= 2
    return _first_of(scales, share).contiguous()


def _first_of(scales: torch.Tensor, share: int) -> torch.Tensor:
    return scales[..., ::share, :]


def rows_per_scale(rows: int, scale_rows: int) -> int:
    """The power of two that `share_rows` found; or a smaller one that gives every row the same scales."""
    return 1 << (-(-rows // scale_rows) - 1).bit_length()


def dequantise(weights: Rows8) -> torch.Tensor:
    """The stored values in float64: e4m3 [..., out, in]."""
    w, scales = weights
    rows, width = w.shape[-2:]
    by_row = scales.repeat_interleave(rows_per_scale(rows, scales.shape[-2]), -2)[..., :rows, :]
    return w.double() * by_column(by_row.double(), width)


def gemm(rows: Rows8, weights: Rows8) -> torch.Tensor:
    """Rows [rows, in] x weights [out, in] -> bfloat16 [rows, out]."""
    x, scales = rows
    total = (x.double() * by_column(scales.double(), x.shape[1])) @ dequantise(weights).T
    return total.float().to(torch.bfloat16)
