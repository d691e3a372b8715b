"""Quantises rows to int8 or e4m3, alone or fused with RMS norm (with or without a residual sum) or SwiGLU, on CUDA.

A program holds one row in registers: it is read once and written once, as int8 with one scale or as e4m3 with one for
each 128 columns. The arithmetic is float32 for any input type. Rows may be slices of wider ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tripool.kernels.ref.fp8 import GROUP
from tripool.kernels.ref.w8a8 import LEAST, Rows8


@triton.jit
def _put_quantised(y, row, width, q, scale, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    if q.dtype.element_ty == tl.int8:
        largest = tl.maximum(tl.max(tl.abs(y), axis=0), LEAST)
        steps = y * (127.0 / largest)
        steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to an integer, ties to even
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        cols = tl.arange(0, BLOCK)
        tl.store(scale + row, largest / 127.0)
    else:
        group, groups = tl.arange(0, BLOCK // 128), tl.cdiv(width, 128)
        y = tl.reshape(y, (BLOCK // 128, 128))
        largest = tl.maximum(tl.max(tl.abs(y), axis=1), LEAST)
        steps = tl.minimum(tl.maximum(y * (448.0 / largest)[:, None], -448.0), 448.0)
        cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(scale + row * groups + group, largest / 448.0, mask=group < groups)
    tl.store(q + row * width + cols, steps.to(q.dtype.element_ty), mask=cols < width)


@triton.jit
def quantise_kernel(x, q, scale, width, stride, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    y = tl.load(x + row * stride + cols, mask=cols < width, other=0.0).to(tl.float32)
    _put_quantised(y, row, width, q, scale, LEAST, BLOCK)


@triton.jit
def rms_norm_quant_kernel(
    x, residual, weight, q, scale, width, x_stride, residual_stride, eps,
    LEAST: tl.constexpr, WITH_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    v = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if WITH_RESIDUAL:
        at = residual + row * residual_stride + cols
        rounded = (v + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        v = rounded.to(tl.float32)  # normalise the rounded value that later layers read
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / width + eps)
    v = v * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    _put_quantised(v, row, width, q, scale, LEAST, BLOCK)


@triton.jit
def swiglu_quant_kernel(
    gate_up, counts, q, scale, width, stride, height,
    LEAST: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if COUNTED and row % height >= tl.load(counts + row // height):
        return
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(gate_up + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + cols, mask=inside, other=0.0).to(tl.float32)
    _put_quantised(gate * tl.sigmoid(gate) * up, row, width, q, scale, LEAST, BLOCK)


def _rows8(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Rows8:
    q = torch.empty(rows, width, dtype=dtype, device=device)
    scales = (rows,) if dtype == torch.int8 else (rows, -(-width // GROUP))
    return q, torch.empty(scales, dtype=torch.float32, device=device)


def _shape(width: int) -> dict[str, int]:
    block = max(GROUP, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 1024))}


def quantise_rows(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> Rows8:
    """x [rows, width]: attention's result on its way to the output product has no norm before it."""
    rows, width = x.shape
    assert x.stride(1) == 1
    q, scale = _rows8(rows, width, x.device, dtype)
    if rows:
        quantise_kernel[(rows,)](x, q, scale, width, x.stride(0), LEAST=LEAST, **_shape(width))
    return q, scale


def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, out: Rows8 | None = None,
    dtype: torch.dtype = torch.int8,
) -> Rows8:  # fmt: skip
    """x [rows, width]; with `residual`, the norm of x + residual, which is stored in `residual`."""
    rows, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    q, scale = out or _rows8(rows, width, x.device, dtype)
    if rows:
        other = x if residual is None else residual
        rms_norm_quant_kernel[(rows,)](
            x, other, weight, q, scale, width, x.stride(0), other.stride(0), eps,
            LEAST=LEAST, WITH_RESIDUAL=residual is not None, **_shape(width),
        )  # fmt: skip
    return q, scale


def swiglu_quant(
    gate_up: torch.Tensor, counts: torch.Tensor | None = None, out: Rows8 | None = None, dtype: torch.dtype = torch.int8
) -> Rows8:
    """gate_up [rows, 2 * width] -> silu(first half) * second half.

    With counts int32 [parts] the rows are in parts of equal height, and of each only the first counts[part] are
    computed: [num_rows] for sorted rows, one count per expert for buffers of fixed height.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and (counts is None or rows % len(counts) == 0)
    q, scale = out or _rows8(rows, width, gate_up.device, dtype)
    if rows:
        height = rows if counts is None else rows // len(counts)
        swiglu_quant_kernel[(rows,)](
            gate_up, gate_up if counts is None else counts, q, scale, width, gate_up.stride(0), height,
            LEAST=LEAST, COUNTED=counts is not None, **_shape(width),
        )  # fmt: skip
    return q, scale
