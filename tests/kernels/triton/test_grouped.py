"""Products by expert: every row meets its own expert's weights, and rows of nobody stay untouched."""

import pytest
import torch

from tripool.kernels.ref import w8a8
from tripool.kernels.triton.grouped_gemm import choose_grouped, grouped_gemm, make_plan
from tripool.kernels.triton.tilings import Narrow, Wide

TINY = Narrow(block_m=16, block_n=64, block_k=64)
SPLIT = Narrow(block_m=16, block_n=64, block_k=64, splits=2)
COUNTS = [[5, 0, 17, 1], [0, 0, 0, 3], [16, 16, 16, 16], [0, 0, 0, 0]]


def check(counts: list[int], starts: list[int], rows: int, n: int, k: int, tiling, device: str) -> None:
    experts = len(counts)
    x = torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=device)
    w = torch.randint(-128, 128, (experts, n, k), dtype=torch.int8, device=device)
    x_scale, w_scale = 0.01 + torch.rand(rows, device=device), 0.01 + torch.rand(experts, n, device=device)
    where = [torch.tensor(one, dtype=torch.int32, device=device) for one in (starts, counts)]
    out = torch.full((rows, n), 77.0, dtype=torch.bfloat16, device=device)
    plan = make_plan(*where, rows, tiling)
    grouped_gemm(x, x_scale, w, w_scale, plan, out=out)
    mine = torch.zeros(rows, dtype=torch.bool)
    for start, count in zip(starts, counts, strict=True):
        mine[start : start + count] = True
    mine = mine.to(device)
    exact = w8a8.grouped_gemm(x, x_scale, w, w_scale, *where)
    torch.testing.assert_close(out[mine], exact[mine], rtol=2**-7, atol=0)
    assert (out[~mine] == 77.0).all()


@pytest.mark.parametrize("tiling", [TINY, SPLIT])
@pytest.mark.parametrize("counts", COUNTS)
def test_sorted_rows(device, counts, tiling):
    starts = [sum(counts[:e]) for e in range(len(counts))]
    check(counts, starts, sum(counts) + 9, 72, 144, tiling, device)


@pytest.mark.parametrize("counts", COUNTS)
def test_buffers_of_fixed_height(device, counts):
    check(counts, [e * 20 for e in range(4)], 80, 72, 144, SPLIT, device)


def test_many_rows_take_the_wide_product_where_there_is_one(device):
    check([130, 0, 257, 64], [0, 130, 130, 387], 460, 264, 272, Wide(), device)
    check([130, 0, 257, 64], [0, 300, 600, 900], 1200, 72, 144, Wide(64 if device == "cpu" else 256, 128), device)


def test_what_an_expert_expects_decides_the_tiling():
    assert choose_grouped(4096, 4096, 7168, 9).block_m >= 128
    few = choose_grouped(8, 4096, 7168, 3)
    assert isinstance(few, Narrow) and few.block_m == 16 and few.splits <= -(-7168 // few.block_k)
