"""RMS norm and SwiGLU of rows in 16 bits on CUDA: one kernel each, read once, computed in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SWIGLU_BLOCK = 1024


@triton.jit
def _rms_norm(x, weight, out, width, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    v = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    y = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps) * gain
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, width], whose rows may be parts of wider ones; weight [width] of any type; result as x, contiguous."""
    rows, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(16, block // 512))
        _rms_norm[(rows,)](x, weight, out, width, x.stride(0), eps, BLOCK=block, num_warps=warps)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * width] -> silu(first half) * second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _swiglu[(rows, triton.cdiv(width, SWIGLU_BLOCK))](
            gate_up, out, width, gate_up.stride(0), BLOCK=SWIGLU_BLOCK, num_warps=4
        )
    return out
