"""RMS norm, the gate's product and the choice of experts on CUDA, for a decode step: two launches.

A program norms one piece of 16 rows' columns, writes it, and multiplies it with the same piece of the gate; `gate.py`
adds the pieces' scores in order and chooses. Pieces have a fixed width, so a row's choice does not depend on other
rows. Scores are float32 sums of exact products of 16-bit numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.ref.w8a8 import LEAST, Rows8
from tripool.kernels.triton.gate import route_parts

PIECE, STEP = 256, 128
MOST_ROWS = 1024
"""Each piece reads whole rows for their norm; above this a norm of its own and torch's product are the faster way."""


@triton.jit(do_not_specialize=["rows"])
def norm_gate_kernel(
    x, gain, gate, normed, steps_of, logits, rows, width, num_experts, eps,
    BLOCK_M: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr, INT8: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, blocks of rows)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live, start = (row < rows)[:, None], row.to(tl.int64)[:, None] * width
    squares = tl.zeros((BLOCK_M, WHOLE), dtype=tl.float32)
    largest = tl.zeros((BLOCK_M, WHOLE), dtype=tl.float32)
    for k in range(0, width, WHOLE):
        cols = k + tl.arange(0, WHOLE)[None, :]
        v = tl.load(x + start + cols, mask=live & (cols < width), other=0.0).to(tl.float32)
        squares += v * v
        if INT8:
            g = tl.load(gain + cols, mask=cols < width, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v * g))
    scale = tl.rsqrt(tl.sum(squares, axis=1) / width + eps)[:, None]
    # Rounding keeps the order: the largest value before it is the largest one after it.
    most = tl.maximum((tl.max(largest, axis=1)[:, None] * scale).to(gate.dtype.element_ty).to(tl.float32), LEAST)
    if INT8 and piece == 0:
        tl.store(steps_of + row[:, None], most / 127.0, mask=live)
    experts = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
    for step in tl.static_range(PIECE // STEP):
        cols = piece * PIECE + step * STEP + tl.arange(0, STEP)
        inside = cols < width
        v = tl.load(x + start + cols[None, :], mask=live & inside[None, :], other=0.0).to(tl.float32)
        g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
        y = (v * g[None, :] * scale).to(gate.dtype.element_ty)
        kept = y
        if INT8:
            kept = ((y.to(tl.float32) * (127.0 / most) + 12582912.0) - 12582912.0).to(tl.int8)  # to the nearest integer
        tl.store(normed + start + cols[None, :], kept, mask=live & inside[None, :])
        at = gate + experts[:, None] * width + cols[None, :]
        w = tl.load(at, mask=(experts < num_experts)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(y, w.T, total, input_precision="ieee")
    to = logits + (piece * rows + row).to(tl.int64)[:, None] * num_experts + experts[None, :]
    tl.store(to, total, mask=live & (experts < num_experts)[None, :])


def norm_route(
    x: torch.Tensor, gain: torch.Tensor, eps: float, gate: torch.Tensor, bias: torch.Tensor | None, plan: RoutePlan,
    *, int8: bool = False,
) -> tuple[torch.Tensor | Rows8, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [rows, width], gain [width], gate [experts, width] in x's type, bias float32 [experts] -> normed
    rows in x's type, experts int32 and weights float32 [rows, top_k], best first. `int8`: the normed rows are quantised
    (after rounding to x's type) and come with float32 scales [rows]."""
    (rows, width), num_experts = x.shape, len(gate)
    assert x.is_contiguous() and gate.is_contiguous() and gate.dtype == x.dtype
    normed, early = torch.empty_like(x, dtype=torch.int8 if int8 else x.dtype), x.is_cuda
    scales = torch.empty(rows if int8 else 0, dtype=torch.float32, device=x.device)
    logits = torch.empty(triton.cdiv(width, PIECE), rows, num_experts, dtype=torch.float32, device=x.device)
    if rows:
        norm_gate_kernel[(len(logits), triton.cdiv(rows, 16))](
            x, gain, gate, normed, scales, logits, rows, width, num_experts, eps, BLOCK_M=16, PIECE=PIECE, STEP=STEP,
            WHOLE=min(1024, triton.next_power_of_2(width)), BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
            EARLY=early, INT8=int8, LEAST=LEAST, num_warps=8, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return ((normed, scales) if int8 else normed), *route_parts(logits, bias, plan)
