"""Routed experts: each token runs through its chosen SwiGLU experts, whose results are summed by weight.

An expert computes only its own tokens, and a token's results are added in the order of its choices, so that a token's
result does not depend on the rest of the batch.
"""

import torch

from tripool.kernels.ref.swiglu import swiglu


class Experts:
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate_up = gate_up  # [experts, 2 * width, hidden]
        self.down = down  # [experts, hidden, width]

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden]; experts and weights [rows, top_k]."""
        parts = torch.empty(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for expert in experts.unique().tolist():
            rows, choice = torch.where(experts == expert)
            parts[rows, choice] = swiglu(x[rows] @ self.gate_up[expert].T) @ self.down[expert].T
        return (parts * weights[..., None]).sum(1)

    @property
    def num_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes
