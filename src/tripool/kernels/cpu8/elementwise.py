"""The gate, from operators whose vector and scalar code agree to the bit (torch's own silu does not)."""

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.exp(-gate).add_(1.0).reciprocal_().mul_(gate).mul_(up)
