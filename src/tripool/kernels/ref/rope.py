"""Rotary embedding in the paired layout: elements 2j and 2j + 1 turn together, like the parts of a complex number.

Checkpoints in the half layout (j with j + dim/2) have their rows reordered when they are loaded, so kernels know one
layout only, and it is the one in which turning is a single complex product.
"""

import torch


def rope_(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turn x [rows, heads, dim] in place by turns, complex64 [rows, dim / 2]."""
    even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()
    cos, sin = cos_sin.real[:, None], cos_sin.imag[:, None]
    x[..., 0::2] = even * cos - odd * sin
    x[..., 1::2] = odd * cos + even * sin
