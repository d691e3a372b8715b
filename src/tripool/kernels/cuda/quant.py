"""Rows to 8 bits as they are, without a norm before: attention's result on its way to the output product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LEAST = tl.constexpr(1e-10)
"""Stands in for the largest value of an all-zero row."""


@triton.jit
def _quantise(x, q, scale, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    y = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(y), axis=0), LEAST)
    steps = y * (127.0 / largest)
    nearest = tl.where(steps < 0, steps - 0.5, steps + 0.5).to(tl.int8)
    tl.store(q + row * width + columns, nearest, mask=inside)
    tl.store(scale + row, largest / 127.0)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, width], rows at any distance -> int8 like it, contiguous, and float32 scales [rows]; to nearest."""
    rows, width = x.shape
    assert x.stride(1) == 1
    q = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantise[(rows,)](x, q, scale, width, x.stride(0), BLOCK=block, num_warps=max(1, min(16, block // 1024)))
    return q, scale
