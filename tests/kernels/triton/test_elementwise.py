"""RMS norm and SwiGLU of 16-bit rows against float64."""

import pytest
import torch

from tripool.kernels.triton.elementwise import rms_norm, swiglu

SIZES = [(1, 4096), (3, 40), (5, 1537), (0, 16)]


def near(ours, wanted):
    bound = 8e-3 if ours.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.double(), wanted, rtol=bound, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_rms_norm(device, rows, width, dtype):
    x = torch.randn(rows, width + 8, device=device).to(dtype)[:, :width]
    gain = torch.rand(width, device=device) + 0.5
    mean = x.double().square().mean(1, keepdim=True)
    near(rms_norm(x, gain, 1e-5), x.double() * (mean + 1e-5).rsqrt() * gain.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_swiglu(device, rows, width, dtype):
    gate_up = (torch.randn(rows, 2 * width, device=device) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    near(swiglu(gate_up), torch.nn.functional.silu(gate) * up)
