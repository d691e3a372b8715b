"""Products in e4m3 by blocks against float64 of the stored values: edge blocks, stacked matrices, splits."""

from __future__ import annotations

import pytest
import torch

from oracle.blocks import stored
from oracle.close import assert_close
from tripool.kernels.ref import fp8
from tripool.kernels.triton.fp8_gemm import BlockTiling, block_gemm, choose_invariant

BF16 = 2**-8
"""The result's rounding."""


@pytest.mark.parametrize(
    "tiling", [BlockTiling(16), BlockTiling(32, 128, 2), BlockTiling(16, 64, 3), BlockTiling(16, 16, band=2), None]
)
@pytest.mark.parametrize(
    ("rows", "outs", "width"),
    [(1, [16], 16), (5, [128, 64], 576), (17, [200], 448), (40, [96, 96], 384), (3, [40, 24], 144)],
)
def test_block_gemm(device: str, tiling: BlockTiling | None, rows: int, outs: list[int], width: int) -> None:
    w, x = stored(outs, width, device), fp8.quantise_rows(torch.randn(rows, width, device=device))
    out = torch.full((rows, sum(outs)), float("nan"), dtype=torch.bfloat16, device=device)
    assert block_gemm(x, w, tiling=tiling, out=out) is out
    exact = (x[0].double() * fp8.by_column(x[1].double(), width)) @ fp8.dequantise(w).T
    assert_close(out.double(), exact, within=BF16)


def test_splits_leave_their_counters_at_zero(device: str) -> None:
    from tripool.kernels.triton.int8_gemm import arrivals

    w, x = stored([64], 512, device), fp8.quantise_rows(torch.randn(3, 512, device=device))
    arrived = arrivals(device, 8)
    first, again = (block_gemm(x, w, arrived, BlockTiling(16, 64, 4)) for _ in range(2))
    assert torch.equal(first, again) and not arrived.any()


def test_no_rows(device: str) -> None:
    empty = fp8.quantise_rows(torch.empty(0, 32, device=device))
    assert block_gemm(empty, stored([16], 32, device)).shape == (0, 16)


@pytest.mark.parametrize(
    ("outs", "share"), [([256], 128), ([512, 64], 128), ([64, 512], 64), ([48, 48], 16), ([129], 128), ([5, 3], 1)]
)
def test_rows_that_share_scales(outs: list[int], share: int) -> None:
    scales = stored(outs, 256, "cpu")[1]
    assert len(scales) == -(-sum(outs) // share)
    assert fp8.rows_per_scale(sum(outs), len(scales)) == share


def test_a_row_has_the_same_bits_in_any_company(device: str) -> None:
    """Values whose products are exact over a group of 128: only the order of the groups' sums can change a bit."""
    width = 2176
    x = torch.randint(-2, 3, (300, width), device=device).to(fp8.E4M3), torch.rand(300, 17, device=device) + 0.5
    w = torch.randint(-2, 3, (96, width), device=device).to(fp8.E4M3), torch.rand(96, 17, device=device) * 100
    kinds = {(t.splits, t.fold) for t in (choose_invariant(rows, 96, width) for rows in (1, 130, 300, 20000))}
    assert kinds == {(2, False), (2, True)}
    together = block_gemm(x, w, choose=choose_invariant)
    folded = BlockTiling(128, 64, 2, 4, 4, band=8, fold=True)
    assert torch.equal(block_gemm(x, w, tiling=folded), together)
    for first, count in ((0, 1), (299, 1), (31, 17), (100, 130)):
        part = slice(first, first + count)
        assert torch.equal(block_gemm((x[0][part], x[1][part]), w, choose=choose_invariant), together[part])
