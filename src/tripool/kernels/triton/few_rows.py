"""Routed experts for few rows, in Triton: a decode step costs one pass over the chosen experts' weights.

Three launches. Each expert lists the (row, choice) pairs that chose it; then a program takes one expert and a strip of
its gate and up rows, reads the strip once and writes gated values by pair; then the same for down, weighted. Each pair
has its own result, so no order of additions depends on other rows. An expert without pairs costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_N, BLOCK_K = 64, 128


@triton.jit
def _list(experts, pairs, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mine = tl.load(experts + at, mask=at < num_pairs, other=-1) == expert
    ones = mine.to(tl.int32)
    tl.store(pairs + expert * num_pairs + tl.cumsum(ones, 0) - 1, at, mask=mine)
    tl.store(counts + expert, tl.sum(ones, 0))


@triton.jit
def _gate_up(
    x, weight, pairs, counts, out, num_pairs, width, hidden, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, columns = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    count = tl.load(counts + expert)
    gates = weight + expert.to(tl.int64) * 2 * width * hidden + columns[:, None] * hidden
    ups = gates + width * hidden
    for start in tl.range(0, count, BLOCK_M):
        member = start + tl.arange(0, BLOCK_M)
        live = member < count
        pair = tl.load(pairs + expert * num_pairs + member, mask=live, other=0)
        rows = x + (pair // top_k)[:, None] * hidden
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, hidden, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)[None, :]
            a = tl.load(rows + at, mask=live[:, None] & (at < hidden), other=0.0)
            g = tl.load(gates + at, mask=inside[:, None] & (at < hidden), other=0.0)
            u = tl.load(ups + at, mask=inside[:, None] & (at < hidden), other=0.0)
            gate = tl.dot(a, tl.trans(g), gate)
            up = tl.dot(a, tl.trans(u), up)
        gated = gate / (1.0 + tl.exp(-gate)) * up
        to = out + pair[:, None] * width + columns[None, :]
        tl.store(to, gated.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _down(
    x, weight, pairs, counts, factors, out, num_pairs, width, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, columns = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden
    count = tl.load(counts + expert)
    strip = weight + expert.to(tl.int64) * hidden * width + columns[:, None] * width
    for start in tl.range(0, count, BLOCK_M):
        member = start + tl.arange(0, BLOCK_M)
        live = member < count
        pair = tl.load(pairs + expert * num_pairs + member, mask=live, other=0)
        rows = x + pair[:, None] * width
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, width, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)[None, :]
            a = tl.load(rows + at, mask=live[:, None] & (at < width), other=0.0)
            w = tl.load(strip + at, mask=inside[:, None] & (at < width), other=0.0)
            acc = tl.dot(a, tl.trans(w), acc)
        factor = tl.load(factors + pair, mask=live, other=0.0)
        to = out + pair[:, None] * hidden + columns[None, :]
        tl.store(to, (acc * factor[:, None]).to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def few_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As `experts.all_rows`: x [rows, hidden], experts int32 or int64, weights float32 [rows, top_k]; bfloat16."""
    rows, top_k = experts.shape
    num_experts, hidden, width = down.shape
    x, num_pairs = x.to(gate_up.dtype).contiguous(), rows * top_k
    pairs = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _list[(num_experts,)](experts.contiguous(), pairs, counts, num_pairs, BLOCK=triton.next_power_of_2(num_pairs))
    gated = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
    block_m = 16 if num_pairs <= 8 * num_experts else 32
    shape = {"BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "num_warps": 4}
    _gate_up[(num_experts, triton.cdiv(width, BLOCK_N))](
        x, gate_up, pairs, counts, gated, num_pairs, width, hidden, top_k, **shape, num_stages=3
    )
    _down[(num_experts, triton.cdiv(hidden, BLOCK_N))](
        gated, down, pairs, counts, weights.contiguous(), parts, num_pairs, width, hidden, **shape, num_stages=4
    )
    return parts.view(rows, top_k, hidden).sum(1).to(x.dtype)
