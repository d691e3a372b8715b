"""Routed experts on CUDA, in 16 bits or in e4m3 by blocks (`ref/fp8`).

Four launches: pairs listed by expert (`expert_blocks`), gate and up with SwiGLU, down, the weighted sum of each row's
choices in their order. A program multiplies a block of one expert's rows with a strip of its weights. Weights are the
tall side of the product and rows the narrow side, so 16 rows need no padding; rows are gathered by index, and of gate
and up only their gated product is written, in e4m3 if the strip holds the 128 channels that share a scale (else a fifth
launch quantises). One row needs no list: each of its choices is a block.

Sums are float32 in order of depth, in e4m3 with the scales applied every 128. The tiling depends on the numbers of
pairs and experts, so the last bits of a row's result may depend on how many rows there are, never on what they hold.
With `invariant` all tilings have one depth, and weights as the tall side of one matrix instruction (see
`invariant_gemm`): then the bits do not depend on the number of rows either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tripool.kernels.ref.fp8 import E4M3, GROUP, rows_per_scale
from tripool.kernels.ref.w8a8 import LEAST, Rows8
from tripool.kernels.triton.expert_blocks import ExpertBlocks, expert_blocks, most_blocks
from tripool.kernels.triton.norm_quant import quantise_rows
from tripool.kernels.triton.permute import sum_choices

Rows = torch.Tensor | Rows8
"""Rows or weights in 16 bits, or in e4m3 with their scales."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Channels and depth of a tile; gate and up are two tiles. In e4m3 the depth is 128."""

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """`block_m` pairs of one expert, and the strips of the two products."""

    block_m: int
    gate_up: Strip = Strip()
    down: Strip = Strip()


def choose_tiling(num_pairs: int, num_experts: int, *, e4m3: bool = False, invariant: bool = False) -> ExpertTiling:
    """By the expected pairs of an expert, with room for one that has more: a second block reads its weights again."""
    per_expert = num_pairs / num_experts
    if e4m3:
        if num_pairs <= num_experts // 4:  # few strips: more warps for each
            return ExpertTiling(16, Strip(128, 128, 8, 4), Strip(64, 128, 4, 5))
        if per_expert <= 8:
            return ExpertTiling(16, Strip(128, 128, 4, 3), Strip(64, 128, 4, 5))
        if per_expert <= 40:
            return ExpertTiling(32, Strip(128, 128, 4, 3), Strip(128, 128, 4, 3))
        return ExpertTiling(64, Strip(128, 128, 8, 4), Strip(128, 128, 4, 3))
    if per_expert <= 8:
        return ExpertTiling(16, Strip(64, 128, 4, 3), Strip(64, 128, 4, 4))
    if per_expert <= 40:
        return ExpertTiling(32, Strip(128, 128, 4, 3), Strip(64, 128, 4, 4))
    if invariant:
        return ExpertTiling(64 if per_expert <= 64 else 128, Strip(64, 128, 4, 3), Strip(128, 128, 8, 3))
    if per_expert <= 64:
        return ExpertTiling(64, Strip(64, 64, 4, 4), Strip(128, 64, 8, 3))
    if per_expert <= 256:
        return ExpertTiling(128, Strip(128, 64, 8, 4), Strip(128, 64, 8, 3))
    return ExpertTiling(128, Strip(128, 64, 8, 3), Strip(256, 64, 8, 3))


@triton.jit
def _block(experts, pairs, blocks, m, BLOCK_M: tl.constexpr, DIRECT: tl.constexpr):
    """This program's expert, the first place of its rows among the sorted pairs, which are its own, their pairs."""
    if DIRECT:
        expert, first, stop = tl.load(experts + m).to(tl.int32), m, m + 1
    else:
        expert, first, stop = tl.load(blocks + 3 * m), tl.load(blocks + 3 * m + 1), tl.load(blocks + 3 * m + 2)
    places = first + tl.arange(0, BLOCK_M)
    live = places < stop
    pair = places if DIRECT else tl.load(pairs + places, mask=live, other=0)
    return expert, first, live, pair


@triton.jit
def scale_factors(
    w_scale, row, rows, group, groups, by_row, BLOCK_N: tl.constexpr, SHARE: tl.constexpr, ONE: tl.constexpr
):
    """Scales of a tile of weights x rows in one group of columns. `ONE`: all channels of a tile share their scale."""
    if ONE:
        factors = (tl.load(w_scale + row // SHARE * groups + group) * by_row)[None, :]
    else:
        channels = row + tl.arange(0, BLOCK_N)
        by_channel = tl.load(w_scale + channels // SHARE * groups + group, mask=channels < rows, other=0.0)
        factors = by_channel[:, None] * by_row[None, :]
    return factors


@triton.jit
def gate_up_kernel(
    x, x_scale, w_desc, w_scale, experts, pairs, blocks, num_blocks, out, out_scale, width, hidden,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEAST: tl.constexpr,
    SHARE: tl.constexpr, ONE: tl.constexpr, DIRECT: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (strips, most blocks): strips of a block run side by side, and so do blocks that share weights.

    SHARE: rows of weights that share a scale; 0: 16 bits.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n, m = tl.program_id(0), tl.program_id(1)
    if not DIRECT and m >= tl.load(num_blocks):
        return
    expert, first, live, pair = _block(experts, pairs, blocks, m, BLOCK_M, DIRECT)
    cols, groups = tl.arange(0, BLOCK_K), tl.cdiv(hidden, BLOCK_K)
    row, both = pair // TOP_K, 2 * width
    rows = x + row[:, None] * hidden + cols[None, :]
    gate_row = expert * both + n * BLOCK_N
    if SHARE > 0:
        w_scale += expert * tl.cdiv(both, SHARE) * groups
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(groups):
        k = group * BLOCK_K
        if EVEN:
            a = tl.load(rows + k, mask=live[:, None], other=0.0)
        else:
            a = tl.load(rows + k, mask=live[:, None] & (k + cols < hidden)[None, :], other=0.0)
        if SHARE > 0:
            by_row = tl.load(x_scale + row * groups + group, mask=live, other=0.0)
            g = scale_factors(w_scale, n * BLOCK_N, both, group, groups, by_row, BLOCK_N, SHARE, ONE)
            u = scale_factors(w_scale, width + n * BLOCK_N, both, group, groups, by_row, BLOCK_N, SHARE, ONE)
            gate += tl.dot(w_desc.load([gate_row, k]), a.T) * g
            up += tl.dot(w_desc.load([gate_row + width, k]), a.T) * u
        else:
            gate = tl.dot(w_desc.load([gate_row, k]), a.T, gate)
            up = tl.dot(w_desc.load([gate_row + width, k]), a.T, up)
    gated = gate * tl.sigmoid(gate) * up
    places, channels = first + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    if out.dtype.element_ty == tl.float8e4nv:
        gated = tl.where((channels < width)[:, None], gated, 0.0)
        largest = tl.maximum(tl.max(tl.abs(gated), axis=0), LEAST)
        gated = tl.minimum(tl.maximum(gated * (448.0 / largest)[None, :], -448.0), 448.0)
        tl.store(out_scale + places * tl.num_programs(0) + n, largest / 448.0, mask=live)
    at = out + places[:, None] * width + channels[None, :]
    tl.store(at, gated.to(out.dtype.element_ty).T, mask=live[:, None] & (channels < width)[None, :])


@triton.jit
def down_kernel(
    x_desc, x_scale, w_desc, w_scale, experts, pairs, blocks, num_blocks, out, width, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, ONE: tl.constexpr,
    DIRECT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As above. Rows lie in the order of places; those after an expert's last belong to others and are not written."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n, m = tl.program_id(0), tl.program_id(1)
    if not DIRECT and m >= tl.load(num_blocks):
        return
    expert, first, live, pair = _block(experts, pairs, blocks, m, BLOCK_M, DIRECT)
    groups, row = tl.cdiv(width, BLOCK_K), expert * hidden + n * BLOCK_N
    if SHARE > 0:
        w_scale += expert * tl.cdiv(hidden, SHARE) * groups
        x_scale += (first + tl.arange(0, BLOCK_M)) * groups
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(groups):
        k = group * BLOCK_K
        if SHARE > 0:
            by_row = tl.load(x_scale + group, mask=live, other=0.0)
            factors = scale_factors(w_scale, n * BLOCK_N, hidden, group, groups, by_row, BLOCK_N, SHARE, ONE)
            total += tl.dot(w_desc.load([row, k]), x_desc.load([first, k]).T) * factors
        else:
            total = tl.dot(w_desc.load([row, k]), x_desc.load([first, k]).T, total)
    channels = n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + pair.to(tl.int64)[:, None] * hidden + channels[None, :]
    tl.store(at, total.to(out.dtype.element_ty).T, mask=live[:, None] & (channels < hidden)[None, :])


def takes(hidden: int, width: int, *, e4m3: bool = False) -> bool:
    """Whether rows of both weights start at 16 bytes, as tensor descriptors need."""
    multiple = 16 if e4m3 else 8
    return hidden % multiple == 0 and width % multiple == 0


def routed_experts(
    x: Rows, experts: torch.Tensor, weights: torch.Tensor, gate_up: Rows, down: Rows,
    onto: torch.Tensor | None = None, also: torch.Tensor | None = None, tiling: ExpertTiling | None = None, *,
    invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [rows, hidden], experts int32 or int64 [rows, top_k], weights float32 [rows, top_k], gate_up [experts, 2 *
    width, hidden] (gate rows, then up rows), down [experts, hidden, width] -> [rows, hidden], in x's type or bfloat16.

    With `onto` [rows, hidden] the sum is added to it in place, and `also` [rows, hidden] with it.
    """
    (rows, top_k), num_experts = experts.shape, len(_values(down))
    e4m3 = _values(down).dtype == E4M3
    hidden = _values(x).shape[1]
    parts = torch.empty(0, dtype=torch.bfloat16 if e4m3 else _values(x).dtype, device=experts.device)
    if rows:
        tiling = tiling or choose_tiling(rows * top_k, num_experts, e4m3=e4m3, invariant=invariant)
        listed = None if rows == 1 else expert_blocks(experts, num_experts, tiling.block_m)
        gated = gate_up_product(x, experts, listed, gate_up, tiling)
        parts = down_product(gated, experts, listed, down, tiling)
    return sum_choices(parts.view(rows, top_k, hidden), weights, onto, also)


def gate_up_product(
    x: Rows, experts: torch.Tensor, listed: ExpertBlocks | None, gate_up: Rows, tiling: ExpertTiling
) -> Rows:
    """-> [pairs, width] in the order of `listed.pairs`. No list: there is one row."""
    strip, (rows, x_scale), (w, w_scale) = tiling.gate_up, _parts(x), _parts(gate_up)
    num_experts, both, hidden = w.shape
    width, e4m3 = both // 2, w.dtype == E4M3
    assert rows.shape == (len(experts), hidden) and rows.is_contiguous() and rows.dtype == w.dtype
    assert takes(hidden, width, e4m3=e4m3) and (not e4m3 or strip.block_k == GROUP)
    quantised = e4m3 and strip.block_n == GROUP
    kind = w.dtype if quantised or not e4m3 else torch.bfloat16
    out = torch.empty(experts.numel(), width, dtype=kind, device=w.device)
    out_scale = torch.empty(len(out), -(-width // GROUP), dtype=torch.float32, device=w.device)
    where, blocks, same = _where(experts, listed, num_experts, tiling.block_m)
    gate_up_kernel[(triton.cdiv(width, strip.block_n), blocks)](
        rows, x_scale, _tiles(w, strip), w_scale, *where, out, out_scale, width, hidden, TOP_K=experts.shape[1],
        LEAST=LEAST, EVEN=hidden % strip.block_k == 0, **same, **_strip(strip),
        **_sharing(w, w_scale, strip, width),
    )  # fmt: skip
    if not e4m3:
        return out
    return (out, out_scale) if quantised else quantise_rows(out, E4M3)


def down_product(
    gated: Rows, experts: torch.Tensor, listed: ExpertBlocks | None, down: Rows, tiling: ExpertTiling
) -> torch.Tensor:
    """gated as `gate_up_product` returns it -> [pairs, hidden] in the order of rows and choices."""
    strip, (rows, x_scale), (w, w_scale) = tiling.down, _parts(gated), _parts(down)
    num_experts, hidden, width = w.shape
    assert rows.shape == (experts.numel(), width) and rows.is_contiguous() and rows.dtype == w.dtype
    kind = torch.bfloat16 if w.dtype == E4M3 else w.dtype
    out = torch.empty(len(rows), hidden, dtype=kind, device=w.device)
    where, blocks, same = _where(experts, listed, num_experts, tiling.block_m)
    x_tiles = TensorDescriptor.from_tensor(rows, [tiling.block_m, strip.block_k])
    down_kernel[(triton.cdiv(hidden, strip.block_n), blocks)](
        x_tiles, x_scale, _tiles(w, strip), w_scale, *where, out, width, hidden, **same, **_strip(strip),
        **_sharing(w, w_scale, strip, 0),
    )  # fmt: skip
    return out


def _values(rows: Rows) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else rows[0]


def _parts(rows: Rows) -> Rows8:
    """With a stand-in where there are no scales."""
    return (rows, rows) if isinstance(rows, torch.Tensor) else rows


def _sharing(w: torch.Tensor, scales: torch.Tensor, strip: Strip, offset: int) -> dict[str, Any]:
    """Rows that share a scale, and whether a whole tile does: tiles start at multiples of their height, or at those
    after `offset`."""
    if w.dtype != E4M3:
        return {"SHARE": 0, "ONE": False}
    assert w.shape[:-2] == scales.shape[:-2] and scales.shape[-1] == -(-w.shape[-1] // GROUP) and scales.is_contiguous()
    share = rows_per_scale(w.shape[-2], scales.shape[-2])
    return {"SHARE": share, "ONE": share % strip.block_n == 0 and offset % strip.block_n == 0}


def _where(
    experts: torch.Tensor, listed: ExpertBlocks | None, num_experts: int, block_m: int
) -> tuple[tuple[torch.Tensor, ...], int, dict[str, Any]]:
    """What both kernels take of the list, the most blocks, the options that both have."""
    assert experts.is_contiguous() and (listed is not None or len(experts) == 1)
    early = experts.is_cuda
    options = {"BLOCK_M": block_m, "DIRECT": listed is None, "EARLY": early} | ({"launch_pdl": True} if early else {})
    if listed is None:
        return (experts,) * 4, experts.numel(), options
    where = experts, listed.pairs, listed.blocks, listed.num_blocks
    return where, most_blocks(experts.numel(), num_experts, block_m), options


def _tiles(weight: torch.Tensor, strip: Strip) -> TensorDescriptor:
    assert weight.is_contiguous()
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [strip.block_n, strip.block_k])


def _strip(strip: Strip) -> dict[str, int]:
    sizes = {"BLOCK_N": strip.block_n, "BLOCK_K": strip.block_k}
    return sizes | {"num_warps": strip.num_warps, "num_stages": strip.num_stages}
