"""Norm and SwiGLU that end in int8: the integers and scales of the plain version, on rows as ugly as they come."""

import pytest
import torch

from tripool.kernels.ref import fp8, w8a8
from tripool.kernels.triton.norm_quant import quantise_rows, rms_norm_quant, swiglu_quant


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def gain(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, x.shape[1], device=x.device)


E4M3_FORMS = {
    "as they are": (lambda x: quantise_rows(x, fp8.E4M3), fp8.quantise_rows),
    "norm": (
        lambda x: rms_norm_quant(x, gain(x), 1e-6, dtype=fp8.E4M3),
        lambda x: fp8.rms_norm_quant(x, gain(x), 1e-6),
    ),
    "swiglu": (lambda x: swiglu_quant(x, dtype=fp8.E4M3), fp8.swiglu_quant),
}


@pytest.mark.parametrize("form", E4M3_FORMS)
def test_e4m3(device, form):
    """A value on the edge between two numbers may fall either way, which is an eighth of it at most."""
    ours, plain = E4M3_FORMS[form]
    x = ugly_rows(9, 192, device).clamp(-80, 80)
    (q, scale), (wanted, wanted_scale) = ours(x), plain(x)
    assert q.dtype == fp8.E4M3
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(q.float(), wanted.float(), rtol=0.13, atol=2**-9)
    assert (q.float() != wanted.float()).float().mean() <= 0.004


def test_e4m3_of_what_it_can_say_is_that(device):
    x = torch.randint(0, 127, (5, 100), dtype=torch.uint8, device=device).view(fp8.E4M3).float()  # 127 is no number
    x[:, 0] = -448.0
    q, scale = quantise_rows(x, fp8.E4M3)
    assert torch.equal(q.float(), x) and torch.equal(scale, torch.ones(5, 1, device=device))


def test_no_rows_is_no_work(device):
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    assert rms_norm_quant(x, torch.ones(64, device=device), 1e-6)[0].shape == (0, 64)
    assert swiglu_quant(x)[0].shape == (0, 32)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (2, 513)])
def test_quantise_rows(device: str, rows: int, width: int) -> None:
    wide = torch.randn(rows, width + 9, device=device)
    wide[0, :width] = 0.0
    x = wide[:, :width]
    q, scale = quantise_rows(x)
    assert q.dtype == torch.int8 and q.shape == x.shape and scale.isfinite().all()
    assert ((q * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all()
    assert (q[0] == 0).all() and (rows == 1 or (q[1:].abs().amax(1) == 127).all())
