"""Sampling in C: `engine.noise.draw` and the argmax of each row, both many times faster than in torch."""

from __future__ import annotations

from array import array

import torch

from tripool.kernels.cpu8.library import library


def draw(row: torch.Tensor, temperature: float, key: int) -> int:
    """One token from a row of logits, float32 [tokens]; the row may hold only the first token ids."""
    row = row.contiguous()
    chosen: int = library().tripool_draw(row.data_ptr(), len(row), temperature, key)
    return chosen


def largest(rows: torch.Tensor) -> list[int]:
    """Argmax of each row of float32 [rows, tokens]; the first of equal values."""
    rows = rows.contiguous()
    count, width = rows.shape
    chosen = array("i", bytes(4 * count))
    library().tripool_largest(rows.data_ptr(), count, width, chosen.buffer_info()[0])
    return chosen.tolist()
