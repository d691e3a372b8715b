"""Routed experts in 16 bits against float64: odd sizes, experts without rows, poisoned weights and outputs.

In float16: Triton 3.6's interpreter multiplies bfloat16 as if its bits were whole numbers.
"""

from __future__ import annotations

import pytest
import torch

from tripool.kernels.cuda.make import all_rows
from tripool.kernels.triton.expert_blocks import expert_blocks, most_blocks
from tripool.kernels.triton.experts16 import Strip, Tiling16, choose_experts16, experts16

SMALL = Tiling16(16, Strip(16, 32), Strip(32, 64))
TALL = Tiling16(32, Strip(64, 64), Strip(64, 32))
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int, top_k: int, experts: int, hidden: int, width: int, device: str) -> Case:
    x = torch.randn(rows, hidden, device=device).to(torch.float16)
    gate_up = (torch.randn(experts + 1, 2 * width, hidden, device=device) / hidden**0.5).to(torch.float16)
    down = (torch.randn(experts + 1, hidden, width, device=device) / width**0.5).to(torch.float16)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices  # nobody chooses the last
    gate_up[-1], down[-1] = float("nan"), float("nan")
    return x, chosen, torch.rand(rows, top_k, device=device), gate_up, down


def exact(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up, down) -> torch.Tensor:
    return all_rows(x.double(), chosen, weights.double(), gate_up[:-1].double(), down[:-1].double())


@pytest.mark.parametrize("tiling", [None, SMALL, TALL])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "width"),
    [(1, 1, 2, 16, 16), (1, 3, 4, 72, 40), (5, 2, 3, 72, 40), (70, 3, 4, 136, 24), (33, 2, 9, 64, 64)],
)
def test_experts(device: str, tiling, rows: int, top_k: int, experts: int, hidden: int, width: int) -> None:
    inputs = case(rows, top_k, experts, hidden, width, device)
    ours, expected = experts16(*inputs, tiling=tiling).double(), exact(*inputs)
    assert ours.isfinite().all()
    assert (ours - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("rows", [1, 6])
def test_the_sum_is_added_to_what_is_there(device: str, rows: int) -> None:
    inputs = case(rows, 2, 5, 64, 32, device)
    onto, also = (torch.randn(rows, 64, device=device).to(torch.float16) for _ in range(2))
    expected = exact(*inputs) + onto.double() + also.double()
    assert experts16(*inputs, onto=onto, also=also) is onto
    assert (onto.double() - expected).norm() / expected.norm() < 2e-3


def test_no_rows(device: str) -> None:
    assert experts16(*case(0, 2, 3, 16, 16, device)).shape == (0, 16)


def test_a_row_does_not_depend_on_what_others_hold(device: str) -> None:
    """Other rows choose other experts and hold other numbers; the tiling, which follows their number, stays."""
    x, chosen, weights, gate_up, down = case(9, 2, 5, 64, 32, device)
    before = experts16(x, chosen, weights, gate_up, down)[4].clone()
    others = torch.arange(9, device=device) != 4
    x[others], chosen[others] = torch.randn_like(x[others]), chosen.roll(3, 0)[others]
    assert torch.equal(experts16(x, chosen, weights, gate_up, down)[4], before)


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (3, 2, 2), (40, 3, 7), (700, 2, 64), (600, 4, 5)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_blocks(device: str, rows: int, top_k: int, experts: int, kind: torch.dtype) -> None:
    """Every pair once, by expert and in order; blocks cover them; their number is within the bound."""
    chosen = torch.rand(rows, experts, device=device).square().topk(min(top_k, experts)).indices.to(kind)
    listed = expert_blocks(chosen, experts, 16)
    flat = chosen.flatten()
    assert torch.equal(listed.pairs.long(), flat.long().argsort(stable=True))
    seen = []
    for expert, first, stop in listed.blocks[: int(listed.num_blocks)].tolist():
        mine = listed.pairs[first : min(first + 16, stop)].long()
        assert len(mine) and (flat[mine] == expert).all()
        seen += mine.tolist()
    assert seen == listed.pairs.tolist()
    assert int(listed.num_blocks) <= most_blocks(flat.numel(), experts, 16)


def test_more_rows_take_taller_blocks() -> None:
    heights = [choose_experts16(pairs, 64).block_m for pairs in (6, 48, 384, 1536, 3072, 16384)]
    assert heights == sorted(heights) and heights[0] == 16 and heights[-1] == 128
