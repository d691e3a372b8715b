"""The int8 product: exact integers scaled once, whatever the tiling, the split and what lay in the output before."""

import pytest
import torch

from tripool.kernels.ref import w8a8
from tripool.kernels.triton.int8_gemm import arrivals, int8_gemm
from tripool.kernels.triton.tilings import Narrow, Resident, Stream, Wide, choose

on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter")
TINY = Narrow(block_m=16, block_n=64, block_k=64)
SPLIT = Narrow(block_m=16, block_n=64, block_k=64, splits=3)
V3_SHAPES = [(7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (7168, 4096), (2048, 7168), (18432, 7168)]


def operands(m: int, n: int, k: int, device: str):
    x, w = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    return x, 0.01 + torch.rand(m, device=device), w, 0.01 + torch.rand(n, device=device)


def poisoned(m: int, n: int, device: str) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)


def assert_same(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Integers are exact; two float products and one rounding may differ in the last bit of a bfloat16."""
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("m", "n", "k", "tiling"),
    [
        (1, 1, 16, TINY),
        (7, 65, 80, TINY),
        (17, 100, 208, SPLIT),
        (16, 64, 192, SPLIT),
        (33, 72, 336, Narrow(block_m=32, block_n=64, block_k=128, splits=2)),
        (130, 136, 144, None),
    ],
)
def test_product_is_the_exact_one(device, m, n, k, tiling):
    given = operands(m, n, k, device)
    out = poisoned(m, n, device)
    assert int8_gemm(*given, out=out, tiling=tiling) is out
    assert_same(out, w8a8.int8_gemm(*given))


@pytest.mark.parametrize(("m", "n", "k", "tiling"), [(7, 65, 80, TINY), (17, 100, 208, SPLIT), (130, 136, 144, None)])
def test_a_product_can_be_added_to_what_is_there(device, m, n, k, tiling):
    given = operands(m, n, k, device)
    out = torch.randn(m, n, device=device).bfloat16() * 1000
    wanted = out.double() + w8a8.int8_gemm(*given).double()
    assert int8_gemm(*given, out=out, tiling=tiling, add=True) is out
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-7 * float(wanted.abs().max()))


def test_counters_are_zeros_again_after_every_call(device):
    arrived = arrivals(device, 64)
    for _ in range(2):
        given = operands(5, 130, 256, device)
        assert_same(int8_gemm(*given, arrived=arrived, tiling=SPLIT), w8a8.int8_gemm(*given))
        assert not arrived.any()


def test_largest_integers_do_not_saturate(device):
    x, x_scale, w, w_scale = operands(16, 64, 512, device)
    x.fill_(-128), w.fill_(-128)
    out = int8_gemm(x, x_scale.fill_(1), w, w_scale.fill_(1), tiling=SPLIT)
    assert (out == 512 * 128 * 128).all()


def test_no_rows_is_no_work(device):
    assert int8_gemm(*operands(0, 64, 32, device)).shape == (0, 64)


@pytest.mark.parametrize(("k", "n"), V3_SHAPES)
@pytest.mark.parametrize("m", [1, 16, 17, 32, 64, 128, 200, 256])
def test_few_rows_have_splits_that_leave_none_empty_and_many_programs_do_not_wait(m, k, n):
    tiling = choose(m, n, k)
    assert not isinstance(tiling, Narrow) or tiling.splits <= -(-k // tiling.block_k)
    assert tiling.block_m >= min(m, 128) or tiling.block_m * 2 > m


def test_many_rows_go_in_bands_and_every_tile_is_somebodys(device):
    """More blocks of tokens than a band, and a last band that is not full."""
    given = operands(70, 200, 48, device)
    out = poisoned(70, 200, device)
    assert_same(int8_gemm(*given, out=out, tiling=Narrow(16, 64, 64, band=2)), w8a8.int8_gemm(*given))
    assert choose(16384, 4096, 7168).band > 0


@on_card
@pytest.mark.parametrize("early", [1, 2])
def test_product_that_starts_early_waits_for_the_result_it_reads(device, early):
    first, second = operands(16, 1024, 2048, device), operands(16, 512, 2048, device)
    for _ in range(10):
        first[0].random_(-128, 128)
        middle = int8_gemm(*first, tiling=Narrow(16, early=early))
        ours = int8_gemm(middle.view(torch.int8), *second[1:], tiling=Narrow(16, early=early))
        middle = int8_gemm(*first, tiling=Narrow(16))
        assert torch.equal(ours, int8_gemm(middle.view(torch.int8), *second[1:], tiling=Narrow(16)))


@on_card
@pytest.mark.parametrize("tiling", [Wide(), Wide(256, 128), Wide(128, 64, num_warps=4, per_sm=2, early=1)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (257, 264, 272), (1000, 2112, 7168), (4001, 520, 512)])
def test_wide_product_is_the_exact_one(device, m, n, k, tiling):
    given = operands(m, n, k, device)
    out = poisoned(m, n, device)
    assert_same(int8_gemm(*given, out=out, tiling=tiling), w8a8.int8_gemm(*given))


@on_card
@pytest.mark.parametrize("tiling", [Wide(), Wide(128, 64, num_warps=4, per_sm=2, early=1), Stream(256, 128, 128, 4, 8)])
def test_wide_product_can_be_added_to_what_is_there(device, tiling):
    given = operands(257, 264, 272, device)
    out = torch.randn(257, 264, device=device).bfloat16() * 1000
    wanted = out.double() + w8a8.int8_gemm(*given).double()
    int8_gemm(*given, out=out, tiling=tiling, add=True)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2**-7 * float(wanted.abs().max()))


STREAMS = [
    Stream(16),
    Stream(32, 128, 128, 5, per_sm=2),
    Stream(16, 64, 256, 5, whole=True),
    Stream(128, 128, 128, 3, per_sm=2),
    Stream(128, 256, 128, 4, 8),
    Stream(256, 128, 128, 4, 8, whole=True, early=0),
    Stream(32, 64, 256, 7, programs=66, before=3),
]


@on_card
@pytest.mark.parametrize("tiling", STREAMS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 16), (16, 2112, 7168), (31, 72, 4112), (200, 520, 1040), (3, 136, 16400)]
)
def test_streamed_product_is_the_exact_one_and_leaves_its_counters_at_zero(device, m, n, k, tiling):
    arrived = arrivals(device)
    for _ in range(2):
        given = operands(m, n, k, device)
        out = poisoned(m, n, device)
        assert_same(int8_gemm(*given, out=out, arrived=arrived, tiling=tiling), w8a8.int8_gemm(*given))
        assert not arrived.any()


@on_card
@pytest.mark.parametrize(
    "tiling", [Stream(16), Stream(16, 64, 256, 5, whole=True, before=2), Stream(16, early=1), Resident(16, 2, 2, 2)]
)
def test_streamed_product_waits_for_the_rows_it_reads(device, tiling):
    first, second = operands(16, 1024, 2048, device), operands(16, 512, 2048, device)
    for _ in range(10):
        first[0].random_(-128, 128)
        ours = int8_gemm(int8_gemm(*first, tiling=tiling).view(torch.int8), *second[1:], tiling=tiling)
        middle = int8_gemm(*first, tiling=Narrow(16))
        assert torch.equal(ours, int8_gemm(middle.view(torch.int8), *second[1:], tiling=Narrow(16)))


@on_card
@pytest.mark.parametrize(
    "tiling", [Resident(32, 2, 5, 2), Resident(16, 3, 4, 2, early=1), Resident(32, 7, 0, 2, early=0)]
)
@pytest.mark.parametrize(("m", "n"), [(1, 8), (16, 2112), (11, 72)])
def test_resident_product_is_the_exact_one_and_leaves_its_sums_at_zero(device, m, n, tiling):
    arrived = arrivals(device)
    for largest in (False, True, False):
        given = operands(m, n, 3584, device)
        if largest:  # as deep as it is, no sum leaves its bits
            given[0].fill_(-128), given[2].fill_(-128)
        out = poisoned(m, n, device)
        assert_same(int8_gemm(*given, out=out, arrived=arrived, tiling=tiling), w8a8.int8_gemm(*given))
        assert not arrived.any()


@pytest.mark.parametrize("tiling", [Stream(16), Stream(32, 128), Resident(32, 2, 1)])
def test_streamed_product_has_a_stand_in_without_a_card(device, tiling):
    given = operands(20, 72, 768, device)
    assert_same(int8_gemm(*given, out=poisoned(20, 72, device), tiling=tiling), w8a8.int8_gemm(*given))
