"""Norm and SwiGLU that end in int8: the integers and scales of the plain version, on rows as ugly as they come."""

import pytest
import torch

from tripool.kernels.ref import w8a8
from tripool.kernels.triton.norm_quant import rms_norm_quant, swiglu_quant

ON_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter cuts float32 to bfloat16 unrounded")


def ugly_rows(rows: int, width: int, device: str) -> torch.Tensor:
    x = torch.randn(rows, width, device=device) * torch.exp(3 * torch.randn(rows, 1, device=device))
    if rows > 3:
        x[1], x[2], x[3, 0] = 0.0, -7.25, 1e4
    return x.to(torch.bfloat16)


def poisoned(rows: int, width: int, device: str) -> w8a8.Rows8:
    q = torch.full((rows, width), -128, dtype=torch.int8, device=device)  # never a result: steps end at -127
    return q, torch.full((rows,), float("nan"), device=device)


def assert_same(ours: w8a8.Rows8, plain: w8a8.Rows8) -> None:
    """A value on the edge between two integers may fall either way; nothing may be further off."""
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=0)
    apart = (ours[0].int() - plain[0].int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() <= 0.002
    assert (ours[0] >= -127).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 100), (4, 1025), (7, 1536)])
def test_norm(device, rows, width):
    x, weight = ugly_rows(rows, width, device), (1 + 0.1 * torch.randn(width, device=device)).to(torch.bfloat16)
    out = poisoned(rows, width, device)
    assert_same(rms_norm_quant(x, weight, 1e-6, out=out), w8a8.rms_norm_quant(x, weight, 1e-6))
    assert not out[1].isnan().any()


def test_norm_of_a_slice_of_wider_rows(device):
    wide, weight = ugly_rows(6, 300, device), torch.ones(200, device=device)
    assert_same(rms_norm_quant(wide[:, 64:264], weight, 1e-6), w8a8.rms_norm_quant(wide[:, 64:264], weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=ON_CARD)])
def test_residual_gets_the_sum_and_the_norm_is_of_what_it_got(device, dtype):
    x, residual = ugly_rows(5, 520, device), ugly_rows(5, 520, device).to(dtype)
    weight = torch.rand(520, device=device)
    theirs = residual.clone()
    ours = rms_norm_quant(x, weight, 1e-6, residual, poisoned(5, 520, device))
    assert_same(ours, w8a8.rms_norm_quant(x, weight, 1e-6, theirs))
    assert torch.equal(residual, theirs)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 96), (4, 1025)])
def test_swiglu(device, rows, width):
    gate_up = torch.cat((ugly_rows(rows, width, device).clamp(-80, 80), ugly_rows(rows, width, device)), dim=1)
    assert_same(swiglu_quant(gate_up, out=poisoned(rows, width, device)), w8a8.swiglu_quant(gate_up))


def test_swiglu_leaves_rows_that_nobody_has(device):
    gate_up = ugly_rows(12, 64, device).clamp(-80, 80)
    counts = torch.tensor([2, 0, 4], dtype=torch.int32, device=device)
    q, scale = swiglu_quant(gate_up, counts, poisoned(12, 32, device))
    mine = torch.tensor([0, 1, 8, 9, 10, 11], device=device)
    plain = w8a8.swiglu_quant(gate_up)
    assert_same((q[mine], scale[mine]), (plain[0][mine], plain[1][mine]))
    assert int(scale.isnan().sum()) == 6 and (q[2:8] == -128).all()


def test_no_rows_is_no_work(device):
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    assert rms_norm_quant(x, torch.ones(64, device=device), 1e-6)[0].shape == (0, 64)
    assert swiglu_quant(x)[0].shape == (0, 32)
