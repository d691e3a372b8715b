"""Routed experts with 16-bit weights on CUDA, from one row to some ten thousand (row, choice) pairs.

Four launches: pairs listed by expert (`expert_blocks`), gate and up with SwiGLU, down, the weighted sum of each row's
choices in their order. A program multiplies a block of one expert's rows with a strip of its weights. Weights are the
tall side of the product and rows the narrow side, so 16 rows need no padding; rows are gathered by index, and of gate
and up only their gated product is written. One row needs no list: each of its choices is a block.

Sums are float32 in order of depth. The tiling depends on the numbers of pairs and experts, so the last bits of a row's
result may depend on how many rows there are, never on what the other rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tripool.kernels.triton.expert_blocks import ExpertBlocks, expert_blocks, most_blocks
from tripool.kernels.triton.permute import sum_choices


@dataclass(frozen=True, slots=True)
class Strip:
    """Channels and depth of a tile; gate and up are two tiles."""

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Tiling16:
    """`block_m` pairs of one expert, and the strips of the two products."""

    block_m: int
    gate_up: Strip = Strip()
    down: Strip = Strip()


MOST_PAIRS = 16384
"""Above this, counting all choices for each expert costs more than a sort."""


def choose_experts16(num_pairs: int, num_experts: int) -> Tiling16:
    """By the expected pairs of an expert, with room for one that has more: a second block reads its weights again."""
    per_expert = num_pairs / num_experts
    if per_expert <= 8:
        return Tiling16(16, Strip(64, 128, 4, 3), Strip(64, 128, 4, 4))
    if per_expert <= 20:
        return Tiling16(32, Strip(64, 128, 4, 3), Strip(64, 128, 4, 4))
    if per_expert <= 64:
        return Tiling16(64, Strip(64, 64, 4, 4), Strip(128, 64, 4, 4))
    return Tiling16(128, Strip(128, 64, 8, 4), Strip(128, 64, 8, 4))


@triton.jit
def _block(experts, pairs, blocks, m, BLOCK_M: tl.constexpr, DIRECT: tl.constexpr):
    """This program's expert, the places of its rows among the sorted pairs, which of them are its own, their pairs."""
    if DIRECT:
        places = m + tl.arange(0, BLOCK_M)
        return tl.load(experts + m).to(tl.int32), m, places < m + 1, m + tl.zeros((BLOCK_M,), dtype=tl.int32)
    first, stop = tl.load(blocks + 3 * m + 1), tl.load(blocks + 3 * m + 2)
    live = first + tl.arange(0, BLOCK_M) < stop
    pair = tl.load(pairs + first + tl.arange(0, BLOCK_M), mask=live, other=0)
    return tl.load(blocks + 3 * m), first, live, pair


@triton.jit
def gate_up_kernel(
    x, w_desc, experts, pairs, blocks, num_blocks, out, width, hidden, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DIRECT: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (strips, most blocks): strips of a block run side by side, and so do blocks that share weights."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n, m = tl.program_id(0), tl.program_id(1)
    if not DIRECT and m >= tl.load(num_blocks):
        return
    expert, first, live, pair = _block(experts, pairs, blocks, m, BLOCK_M, DIRECT)
    cols = tl.arange(0, BLOCK_K)
    rows = x + (pair // TOP_K)[:, None] * hidden + cols[None, :]
    gate_row = expert * 2 * width + n * BLOCK_N
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_K):
        if EVEN:
            a = tl.load(rows + k, mask=live[:, None], other=0.0)
        else:
            a = tl.load(rows + k, mask=live[:, None] & (k + cols < hidden)[None, :], other=0.0)
        gate = tl.dot(w_desc.load([gate_row, k]), a.T, gate)
        up = tl.dot(w_desc.load([gate_row + width, k]), a.T, up)
    gated = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty).T
    places, channels = first + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + places[:, None] * width + channels[None, :]
    tl.store(at, gated, mask=live[:, None] & (channels < width)[None, :])


@triton.jit
def down_kernel(
    x_desc, w_desc, experts, pairs, blocks, num_blocks, out, width, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DIRECT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As above. Rows lie in the order of places; those after an expert's last belong to others and are not written."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n, m = tl.program_id(0), tl.program_id(1)
    if not DIRECT and m >= tl.load(num_blocks):
        return
    expert, first, live, pair = _block(experts, pairs, blocks, m, BLOCK_M, DIRECT)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        total = tl.dot(w_desc.load([expert * hidden + n * BLOCK_N, k]), x_desc.load([first, k]).T, total)
    channels = n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + pair.to(tl.int64)[:, None] * hidden + channels[None, :]
    tl.store(at, total.to(out.dtype.element_ty).T, mask=live[:, None] & (channels < hidden)[None, :])


def takes(hidden: int, width: int) -> bool:
    """Whether rows of both weights start at 16 bytes, as tensor descriptors need."""
    return hidden % 8 == 0 and width % 8 == 0


def experts16(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    onto: torch.Tensor | None = None, also: torch.Tensor | None = None, tiling: Tiling16 | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [rows, hidden], experts int32 or int64 [rows, top_k], weights float32 [rows, top_k], gate_up [experts, 2 *
    width, hidden] (gate rows, then up rows), down [experts, hidden, width] -> [rows, hidden].

    With `onto` [rows, hidden] the sum is added to it in place, and `also` [rows, hidden] with it.
    """
    (rows, top_k), hidden = experts.shape, x.shape[1]
    parts = x.new_empty(0)
    if rows:
        tiling = tiling or choose_experts16(rows * top_k, len(down))
        listed = None if rows == 1 else expert_blocks(experts, len(down), tiling.block_m)
        gated = gate_up_product(x, experts, listed, gate_up, tiling)
        parts = down_product(gated, experts, listed, down, tiling)
    return sum_choices(parts.view(rows, top_k, hidden), weights, onto, also)


def gate_up_product(
    x: torch.Tensor, experts: torch.Tensor, listed: ExpertBlocks | None, gate_up: torch.Tensor, tiling: Tiling16
) -> torch.Tensor:
    """-> [pairs, width] in the order of `listed.pairs`. No list: there is one row."""
    strip, (num_experts, both, hidden) = tiling.gate_up, gate_up.shape
    width = both // 2
    assert x.shape == (len(experts), hidden) and x.is_contiguous() and x.dtype == gate_up.dtype and takes(hidden, width)
    out = x.new_empty(experts.numel(), width)
    where, blocks, same = _where(experts, listed, num_experts, tiling.block_m)
    gate_up_kernel[(triton.cdiv(width, strip.block_n), blocks)](
        x, _tiles(gate_up, strip), *where, out, width, hidden, TOP_K=experts.shape[1],
        EVEN=hidden % strip.block_k == 0, **same, **_strip(strip),
    )  # fmt: skip
    return out


def down_product(
    gated: torch.Tensor, experts: torch.Tensor, listed: ExpertBlocks | None, down: torch.Tensor, tiling: Tiling16
) -> torch.Tensor:
    """gated as `gate_up_product` returns it -> [pairs, hidden] in the order of rows and choices."""
    strip, (num_experts, hidden, width) = tiling.down, down.shape
    assert gated.shape == (experts.numel(), width) and gated.is_contiguous() and gated.dtype == down.dtype
    out = gated.new_empty(len(gated), hidden)
    where, blocks, same = _where(experts, listed, num_experts, tiling.block_m)
    rows = TensorDescriptor.from_tensor(gated, [tiling.block_m, strip.block_k])
    down_kernel[(triton.cdiv(hidden, strip.block_n), blocks)](
        rows, _tiles(down, strip), *where, out, width, hidden, **same, **_strip(strip)
    )
    return out


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
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [strip.block_n, strip.block_k])


def _strip(strip: Strip) -> dict[str, int]:
    sizes = {"BLOCK_N": strip.block_n, "BLOCK_K": strip.block_k}
    return sizes | {"num_warps": strip.num_warps, "num_stages": strip.num_stages}
