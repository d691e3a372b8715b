"""The Triton kernels of `kernels/cuda`, against their plain forms: odd sizes, experts without rows, poisoned weights.

In float16: Triton 3.6's interpreter multiplies bfloat16 as if its bits were whole numbers.
"""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "width"), [(1, 1, 2, 16, 16), (5, 2, 3, 72, 40), (33, 3, 4, 130, 65)]
)
def test_few_rows(device: str, rows: int, top_k: int, experts: int, hidden: int, width: int) -> None:
    from tripool.kernels.cuda.make import all_rows
    from tripool.kernels.triton.few_rows import few_rows

    x = torch.randn(rows, hidden, device=device).to(torch.float16)
    gate_up = (torch.randn(experts + 1, 2 * width, hidden, device=device) / hidden**0.5).to(torch.float16)
    down = (torch.randn(experts + 1, hidden, width, device=device) / width**0.5).to(torch.float16)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices  # nobody chooses the last
    weights = torch.rand(rows, top_k, device=device)
    gate_up[-1], down[-1] = float("nan"), float("nan")
    ours = few_rows(x, chosen, weights, gate_up, down).double()
    exact = all_rows(x.double(), chosen, weights.double(), gate_up[:-1].double(), down[:-1].double())
    assert ours.isfinite().all()
    assert (ours - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (2, 513)])
def test_quantise_rows(device: str, rows: int, width: int) -> None:
    from tripool.kernels.triton.norm_quant import quantise_rows

    wide = torch.randn(rows, width + 9, device=device)
    wide[0, :width] = 0.0
    x = wide[:, :width]
    q, scale = quantise_rows(x)
    assert q.dtype == torch.int8 and q.shape == x.shape and scale.isfinite().all()
    assert ((q * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all()
    assert (q[0] == 0).all() and (rows == 1 or (q[1:].abs().amax(1) == 127).all())
