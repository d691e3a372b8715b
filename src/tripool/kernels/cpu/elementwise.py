"""RMS norm, rotary embedding and SwiGLU."""

import torch
import torch.nn.functional as F

from tripool.kernels.ref.rope import rope_ as plain_rope_


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rope_(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    if x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1]):
        plain_rope_(x, cos_sin)  # the alignment does not allow a complex view
        return
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    torch.mul(pairs, cos_sin[:, None], out=pairs)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
