"""Choices from logits in C: `engine.noise.draw`, and the largest of each row, both many times faster."""

from __future__ import annotations

from array import array

import torch

from tripool.kernels.cpu8.library import library


def draw(row: torch.Tensor, temperature: float, key: int) -> int:
    """Row: float32 [tokens], the first ids or all of them."""
    row = row.contiguous()
    chosen: int = library().tripool_draw(row.data_ptr(), len(row), temperature, key)
    return chosen


def largest(rows: torch.Tensor) -> list[int]:
    """Of each row of float32 [rows, tokens] the first of the largest."""
    rows = rows.contiguous()
    count, width = rows.shape
    chosen = array("i", bytes(4 * count))
    library().tripool_largest(rows.data_ptr(), count, width, chosen.buffer_info()[0])
    return chosen.tolist()
