"""Rotary embedding in the interleaved layout: elements 2j and 2j + 1 are one complex number.

Checkpoints in the half layout (j with j + dim / 2) have their rows reordered when they are loaded, so kernels support
this layout only, in which the rotation is a single complex product.
"""

import torch


def rope_(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate x [rows, heads, dim] in place by cos_sin, complex64 [rows, dim / 2]."""
    even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()
    cos, sin = cos_sin.real[:, None], cos_sin.imag[:, None]
    x[..., 0::2] = even * cos - odd * sin
    x[..., 1::2] = odd * cos + even * sin
