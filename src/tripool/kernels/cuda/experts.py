"""Routed experts on the device, without asking it how many rows each expert got.

Three ways, by what is known before: few rows in bfloat16 go through Triton kernels that read each weight once
(`few_rows`); many rows are sorted by expert and multiplied by torch's grouped product; anything else (float32, or a
device without that product) runs every expert over every row and keeps what was chosen: wasteful, plain, and the
oracle of the other two.
"""

from __future__ import annotations

import torch

from tripool.kernels.cuda.elementwise import swiglu
from tripool.kernels.weight_store import FRESH, WeightStore

MOST_FEW = 1024
"""Rows times choices up to which a pass over the weights is the cost, not the products."""


class Experts:
    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        store: WeightStore = FRESH,
        dtype: torch.dtype = torch.float32,
        fused: bool = False,
    ) -> None:
        self._gate_up = store.keep("gate_up", lambda: gate_up.to(dtype))  # [experts, 2 * width, hidden]
        self._down = store.keep("down", lambda: down.to(dtype))  # [experts, hidden, width]
        self._fused = fused and dtype == torch.bfloat16
        self.num_bytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden]; experts and weights [rows, top_k]."""
        if not self._fused:
            return all_rows(x, experts, weights, self._gate_up, self._down)
        if experts.numel() <= MOST_FEW:
            from tripool.kernels.triton.few_rows import few_rows

            return few_rows(x, experts, weights, self._gate_up, self._down)
        return sorted_rows(x, experts, weights, self._gate_up, self._down)


def all_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Every expert over every row."""
    told = weights.new_zeros(len(x), len(gate_up)).scatter_(1, experts, weights)
    parts = swiglu(x.to(gate_up.dtype) @ gate_up.mT) @ down.mT  # [experts, rows, hidden]
    return torch.einsum("erh,re->rh", parts, told.to(parts.dtype))


def sorted_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Rows stand together by expert, and a grouped product is told where each expert's end."""
    rows, top_k = experts.shape
    flat, order = experts.flatten().sort(stable=True)
    every = torch.arange(len(gate_up), dtype=flat.dtype, device=x.device)
    ends = torch.searchsorted(flat, every, right=True, out_int32=True)
    grouped = x.to(gate_up.dtype).index_select(0, order // top_k)
    out = torch._grouped_mm(swiglu(torch._grouped_mm(grouped, gate_up.mT, offs=ends)), down.mT, offs=ends)
    back = torch.empty_like(out).index_copy_(0, order, out).view(rows, top_k, -1)
    return torch.bmm(weights[:, None].to(back.dtype), back)[:, 0]
