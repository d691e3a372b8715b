"""RMS norm, rotary embedding and SwiGLU on the device. Results have the type of the next computation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tripool.kernels.weights import Norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(x, norm.gain, norm.eps)


def rope_(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Computed in float32 for any x: there is no narrower complex type."""
    pairs = torch.view_as_complex(x.to(torch.float32, copy=True).unflatten(-1, (-1, 2)))
    x.copy_(torch.view_as_real(pairs.mul_(cos_sin[:, None])).flatten(-2))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
