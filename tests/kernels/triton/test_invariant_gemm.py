"""Batch-invariant products: right to rounding, and the same bits for a row in any number of rows, place and tiling."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oracle.close import assert_close
from tripool.kernels.triton import invariant_gemm as module
from tripool.kernels.triton.int8_gemm import arrivals
from tripool.kernels.triton.invariant_gemm import (
    BLOCK_K,
    InvariantTiling,
    choose_invariant,
    invariant_bmm,
    invariant_gemm,
    num_pieces,
)

BF16 = 2**-8
DEEP = 2176
"""Two pieces, the second one longer."""


def order_matters(rows: int, outs: int, depth: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over 64 of depth are exact in float32 in any order, sums of these are not: only what the kernel decides can
    change a bit."""
    x = torch.randint(-3, 4, (rows, depth), device=device)
    sizes = torch.randint(0, 22, (-(-depth // BLOCK_K),), device=device).repeat_interleave(BLOCK_K)[:depth]
    w = torch.randint(-3, 4, (outs, depth), device=device) * 2.0**sizes
    return x.bfloat16(), w.bfloat16()


@pytest.mark.parametrize("tiling", [None, InvariantTiling(16), InvariantTiling(32, 128, split=False, band=2)])
@pytest.mark.parametrize(("rows", "outs", "depth"), [(1, 1, 8), (5, 200, 72), (40, 96, 2056), (130, 65, 136)])
def test_products(device: str, tiling: InvariantTiling | None, rows: int, outs: int, depth: int) -> None:
    x = torch.randn(rows, depth, device=device).bfloat16()
    w, bias = (torch.randn(shape, device=device).bfloat16() for shape in ((outs, depth), (outs,)))
    expected = x.double() @ w.double().T + bias.double()
    assert_close(invariant_gemm(x, w, bias, tiling=tiling).double(), expected, within=BF16)
    before = torch.randn(rows, outs, device=device).bfloat16()
    onto = before.clone()
    assert invariant_gemm(x, w, bias, out=onto, add=True, tiling=tiling) is onto
    assert_close(onto.double(), expected + before.double(), within=BF16)


def test_rows_may_be_parts_of_wider_ones(device: str) -> None:
    wide, w = (torch.randn(rows, 80, device=device).bfloat16() for rows in (7, 30))
    for part in (slice(16, 64), slice(3, 51)):  # the second one does not start at 16 bytes
        ours = invariant_gemm(wide[:, part], w[:, part].contiguous())
        assert torch.equal(ours, invariant_gemm(wide[:, part].contiguous(), w[:, part].contiguous()))


def test_a_row_has_the_same_bits_in_any_company(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_pieces(70, DEEP) == 2
    x, w = order_matters(140, 70, DEEP, device)
    together = invariant_gemm(x, w, dtype=torch.float32)
    for first, count in ((0, 1), (139, 1), (20, 17), (60, 40), (5, 70), (1, 139)):
        part = invariant_gemm(x[first : first + count].clone(), w, dtype=torch.float32)
        assert torch.equal(part, together[first : first + count]), (first, count)
    for tiling in (InvariantTiling(64), InvariantTiling(128, 128, split=False, num_warps=8, num_stages=3, band=8)):
        assert torch.equal(invariant_gemm(x, w, dtype=torch.float32, tiling=tiling), together)
    monkeypatch.setattr(module, "num_pieces", lambda n, k: 1)
    assert not torch.equal(invariant_gemm(x, w, dtype=torch.float32), together), "these numbers show another order"


def test_tiles_are_chosen_by_rows_and_pieces_are_not() -> None:
    assert choose_invariant(1, 2048, 2048) != choose_invariant(4096, 2048, 2048)
    assert num_pieces(2048, 2048) == 2 and num_pieces(102400, 2048) == 1 and num_pieces(64, 512) == 1
    for rows in (1, 17, 129, 1000, 4096):
        assert choose_invariant(rows, 2048, 2048).block_n % 64 == 0


def test_counters_are_left_at_zero(device: str) -> None:
    x, w = order_matters(3, 64, DEEP, device)
    arrived = arrivals(device, 8)
    first, again = (invariant_gemm(x, w, arrived=arrived) for _ in range(2))
    assert torch.equal(first, again) and not arrived.any()


def test_no_rows(device: str) -> None:
    empty = torch.empty(0, 64, device=device, dtype=torch.bfloat16)
    assert invariant_gemm(empty, torch.ones(24, 64, device=device, dtype=torch.bfloat16)).shape == (0, 24)
    invariant_bmm(empty.view(0, 4, 16), torch.ones(4, 24, 16, device=device).bfloat16(), empty.new_empty(0, 4, 24))


@pytest.mark.parametrize(("rows", "heads", "depth", "outs"), [(1, 3, 16, 40), (70, 2, 72, 130)])
def test_products_by_head(device: str, rows: int, heads: int, depth: int, outs: int) -> None:
    wide = torch.randn(rows, heads, depth + 8, device=device).bfloat16()
    up = torch.randn(heads, depth + outs, outs, device=device).bfloat16()
    x, w = wide[..., :depth], up[:, :depth].mT
    out = torch.full((rows, heads, outs + 8), 7.0, device=device).bfloat16()
    invariant_bmm(x, w, out[..., :outs])
    expected = torch.einsum("rhk,hnk->rhn", x.double(), w.double())
    assert_close(out[..., :outs].double(), expected, within=BF16)
    assert out[..., outs:].eq(7).all()
    for first, count in ((0, 1), (rows - 1, 1), (rows // 3, rows - rows // 3)):
        part = torch.empty(count, heads, outs, device=device).bfloat16()
        invariant_bmm(wide[first : first + count, :, :depth], w, part)
        assert torch.equal(part, out[first : first + count, :, :outs])


@pytest.mark.prove
def test_all_tilings_use_one_matrix_instruction() -> None:
    """On Hopper, with 64 channels and one depth; only the number of rows beside them differs."""
    program = Path(__file__).with_name("instructions.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for by_tiling, depth in zip(json.loads(done.stdout), (16, 32, 16), strict=True):
        assert len(by_tiling) > 2
        for tiling, found in by_tiling.items():
            assert len(found) == 1 and re.match(rf"m64n\d+k{depth}\.f32\.", found[0]), (tiling, found)
