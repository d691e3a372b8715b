"""Routed experts in 16 bits and in e4m3 against plain forms: odd sizes, experts without rows, poisoned weights."""

from __future__ import annotations

import pytest
import torch

from oracle.blocks import stored
from tripool.kernels.cuda.arithmetic import FLOATS
from tripool.kernels.cuda.make import all_rows
from tripool.kernels.ref import fp8
from tripool.kernels.triton.expert_blocks import expert_blocks, most_blocks
from tripool.kernels.triton.experts import ExpertTiling, Strip, choose_tiling, routed_experts

SMALL = ExpertTiling(16, Strip(16, 32), Strip(32, 64))
EIGHT = ExpertTiling(16, Strip(128), Strip(32))
TALL = ExpertTiling(32, Strip(64, 64), Strip(64, 32))
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int, top_k: int, experts: int, hidden: int, width: int, device: str) -> Case:
    x = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    gate_up = (torch.randn(experts + 1, 2 * width, hidden, device=device) / hidden**0.5).to(torch.bfloat16)
    down = (torch.randn(experts + 1, hidden, width, device=device) / width**0.5).to(torch.bfloat16)
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices  # nobody chooses the last
    gate_up[-1], down[-1] = float("nan"), float("nan")
    return x, chosen, torch.rand(rows, top_k, device=device), gate_up, down


def stacked(experts: int, outs: list[int], width: int, device: str) -> fp8.Rows8:
    parts = [stored(outs, width, device, shared=False) for _ in range(experts)]
    w = torch.stack([w.view(torch.int8) for w, _ in parts]).view(fp8.E4M3)
    return w, fp8.share_rows(torch.stack([scales for _, scales in parts]))


def exact(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up, down) -> torch.Tensor:
    return all_rows(x.double(), chosen, weights.double(), gate_up[:-1].double(), down[:-1].double())


@pytest.mark.parametrize("tiling", [None, SMALL, TALL])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "width"),
    [(1, 1, 2, 16, 16), (1, 3, 4, 72, 40), (5, 2, 3, 72, 40), (70, 3, 4, 136, 24), (33, 2, 9, 64, 64)],
)
def test_experts(device: str, tiling, rows: int, top_k: int, experts: int, hidden: int, width: int) -> None:
    inputs = case(rows, top_k, experts, hidden, width, device)
    ours, expected = routed_experts(*inputs, tiling=tiling).double(), exact(*inputs)
    assert ours.isfinite().all()
    assert (ours - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("rows", [1, 6])
def test_the_sum_is_added_to_what_is_there(device: str, rows: int) -> None:
    inputs = case(rows, 2, 5, 64, 32, device)
    onto, also = (torch.randn(rows, 64, device=device).to(torch.bfloat16) for _ in range(2))
    expected = exact(*inputs) + onto.double() + also.double()
    assert routed_experts(*inputs, onto=onto, also=also) is onto
    assert (onto.double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("tiling", [None, EIGHT, ExpertTiling(32, Strip(64), Strip(64))])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "width"),
    [(1, 3, 4, 144, 80), (5, 2, 3, 64, 272), (70, 3, 4, 400, 128), (9, 2, 5, 256, 48)],
)
def test_experts_in_e4m3(device: str, tiling, rows: int, top_k: int, experts: int, hidden: int, width: int) -> None:
    """Weights as stored, each part with its own grid of blocks; an expert that nobody chooses has NaN for scales."""
    gate_up = stacked(experts + 1, [width, width], hidden, device)
    down = stacked(experts + 1, [hidden], width, device)
    gate_up[1][-1], down[1][-1] = float("nan"), float("nan")
    x = fp8.quantise_rows(torch.randn(rows, hidden, device=device))
    chosen = torch.rand(rows, experts, device=device).topk(top_k).indices
    weights = torch.rand(rows, top_k, device=device)
    ours = routed_experts(x, chosen, weights, gate_up, down, tiling=tiling)
    expected = FLOATS.experts(x, chosen, weights, gate_up, down, None, None)
    assert ours.isfinite().all() and ours.dtype == torch.bfloat16
    # The plain form rounds to bfloat16 before e4m3: a value on the edge between two numbers may fall either way.
    assert (ours - expected).norm() / expected.norm() < 0.03


def test_no_rows(device: str) -> None:
    assert routed_experts(*case(0, 2, 3, 16, 16, device)).shape == (0, 16)


def test_a_row_does_not_depend_on_what_others_hold(device: str) -> None:
    """Other rows choose other experts and hold other numbers; the tiling, which follows their number, stays."""
    x, chosen, weights, gate_up, down = case(9, 2, 5, 64, 32, device)
    before = routed_experts(x, chosen, weights, gate_up, down)[4].clone()
    others = torch.arange(9, device=device) != 4
    x[others], chosen[others] = torch.randn_like(x[others]), chosen.roll(3, 0)[others]
    assert torch.equal(routed_experts(x, chosen, weights, gate_up, down)[4], before)


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (3, 2, 2), (40, 3, 7), (700, 2, 64), (600, 4, 5)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("one_launch", [True, False])
def test_blocks(
    device: str, monkeypatch: pytest.MonkeyPatch, rows: int, top_k: int, experts: int, kind: torch.dtype,
    one_launch: bool,
) -> None:  # fmt: skip
    """Every pair once, by expert and in order; blocks cover them; their number is within the bound."""
    if not one_launch:
        monkeypatch.setattr("tripool.kernels.triton.expert_blocks.MOST_PAIRS", 0)
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
    heights = [choose_tiling(pairs, 64).block_m for pairs in (6, 48, 384, 1536, 3072, 16384)]
    assert heights == sorted(heights) and heights[0] == 16 and heights[-1] == 128


def test_a_row_has_the_same_bits_among_any_number_of_rows(device: str) -> None:
    """Through every tiling of the invariant mode, one row alone without a list of pairs."""
    x, chosen, weights, gate_up, down = case(150, 2, 3, 136, 72, device)
    together = routed_experts(x, chosen, weights, gate_up, down, invariant=True)
    assert len({choose_tiling(2 * rows, 4, invariant=True) for rows in (5, 60, 120, 150)}) == 4
    for first, count in ((77, 1), (3, 5), (40, 60), (0, 120)):
        part = slice(first, first + count)
        given = x[part].contiguous(), chosen[part].contiguous(), weights[part].contiguous()
        assert torch.equal(routed_experts(*given, gate_up, down, invariant=True), together[part]), count
