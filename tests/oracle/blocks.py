"""Random weights in e4m3 by blocks, as `kernels/ref/fp8` describes them."""

from __future__ import annotations

import torch

from tripool.kernels.ref import fp8


def stored(outs: list[int], width: int, device: str, *, shared: bool = True) -> fp8.Rows8:
    """Matrices of these heights under each other, each with its own grid of blocks; not `shared`: scales by row."""
    w = (torch.randn(sum(outs), width, device=device) * 60).clamp(-448, 448).to(fp8.E4M3)
    grids = [(torch.rand(-(-out // 128), -(-width // 128), device=device) + 0.1) / 500 for out in outs]
    by_row = torch.cat([grid.repeat_interleave(128, 0)[:out] for grid, out in zip(grids, outs, strict=True)])
    return w, fp8.share_rows(by_row) if shared else by_row
