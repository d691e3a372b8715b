"""`engine.noise.draw` in C: the same choice, many times faster."""

from __future__ import annotations

import torch

from tripool.kernels.cpu8.library import library


def draw(row: torch.Tensor, temperature: float, key: int) -> int:
    """Row: float32 [tokens], the first ids or all of them."""
    row = row.contiguous()
    chosen: int = library().tripool_draw(row.data_ptr(), len(row), temperature, key)
    return chosen
