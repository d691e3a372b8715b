"""8-bit arithmetic: int8 with our kernels, e4m3 with torch's scaled products.

`fused`: with Triton kernels, which need a CUDA device (or Triton's interpreter); otherwise the same arithmetic in small
steps on any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from tripool.kernels.cuda.quantized_linear import QuantizedOps
from tripool.kernels.ref import fp8, permute, w8a8
from tripool.kernels.ref.permute import ExpertOrder
from tripool.kernels.ref.w8a8 import Rows8
from tripool.kernels.weights import E4M3, INT8

Product = Callable[[Rows8, Rows8], torch.Tensor]


def quantized_ops_of(stored: str, *, fused: bool, device: torch.device | str = "cpu") -> QuantizedOps:
    assert stored in (INT8, E4M3), stored
    if stored == INT8:
        return _integers_fused(torch.device(device)) if fused else INTEGERS
    return _e4m3_fused() if fused else FLOATS


def _packed_integers(steps: torch.Tensor) -> torch.Tensor:
    return steps.round().to(torch.int8)


def _packed_floats(steps: torch.Tensor) -> torch.Tensor:
    return steps.clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.E4M3)


def _one_by_one(product: Product, rows: Rows8, weights: Rows8, starts: torch.Tensor) -> torch.Tensor:
    """One expert after the other. Reads the row offsets from the device."""
    out = torch.empty(len(rows[0]), weights[0].shape[1], dtype=torch.bfloat16, device=rows[0].device)
    bounds = starts.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            expert_rows = rows[0][start:stop], rows[1][start:stop]
            out[start:stop] = product(expert_rows, (weights[0][expert], weights[1][expert]))
    return out


def _scaled_mm(rows: Rows8, weights: Rows8) -> torch.Tensor:
    by_row, by_channel = rows[1][:, None], weights[1][None, :]
    return F.scaled_mm(rows[0], weights[0].T, by_row, ScalingType.RowWise, by_channel, ScalingType.RowWise)


def _scaled_grouped_mm(rows: Rows8, weights: Rows8, starts: torch.Tensor) -> torch.Tensor:
    (x, by_row), (w, by_channel), ends = rows, weights, starts[1:]
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]  # missing in torch's stubs
        x, w.mT, by_row, ScalingType.RowWise, by_channel, ScalingType.RowWise, offs=ends
    )


def _integer_product(rows: Rows8, weights: Rows8) -> torch.Tensor:
    return w8a8.int8_gemm(*rows, *weights)


def _float_product(rows: Rows8, weights: Rows8) -> torch.Tensor:
    return fp8.gemm(*rows, *weights)


INTEGERS = QuantizedOps(
    stored=INT8,
    dtype=torch.int8,
    outs_multiple=8,
    pack=_packed_integers,
    quantise=w8a8.quantise_rows,
    norm=w8a8.rms_norm_quant,
    swiglu=w8a8.swiglu_quant,
    product=_integer_product,
    groups=lambda expert_order: expert_order.starts,
    grouped=partial(_one_by_one, _integer_product),
    sort=permute.sort_by_expert,
    permute=permute.permute,
    unpermute=permute.unpermute,
)
FLOATS = replace(
    INTEGERS,
    stored=E4M3,
    dtype=fp8.E4M3,
    outs_multiple=16,
    pack=_packed_floats,
    quantise=fp8.quantise_rows,
    norm=fp8.rms_norm_quant,
    swiglu=fp8.swiglu_quant,
    product=_float_product,
    grouped=partial(_one_by_one, _float_product),
)


def _integers_fused(device: torch.device) -> QuantizedOps:
    from tripool.kernels.triton import norm_quant, permute
    from tripool.kernels.triton.grouped_gemm import Plan, choose_grouped, grouped_gemm, make_plan
    from tripool.kernels.triton.int8_gemm import arrivals, int8_gemm
    from tripool.kernels.triton.tilings import Narrow, Wide

    arrived = arrivals(device)

    def groups(expert_order: ExpertOrder) -> Plan:
        """The plan depends only on the block height, which follows from the numbers of rows and experts."""
        experts, rows = len(expert_order.starts) - 1, expert_order.slots.numel()
        return make_plan(expert_order.starts, expert_order.starts.diff(), rows, _tiling(rows, 1, 1, experts))

    def grouped(rows: Rows8, weights: Rows8, plan: Plan) -> torch.Tensor:
        experts, out, width = weights[0].shape
        tiling = _tiling(len(rows[0]), out, width, experts)
        assert tiling.block_m == plan.tiling.block_m
        return grouped_gemm(*rows, *weights, replace(plan, tiling=tiling), arrived=arrived)

    def _tiling(rows: int, out: int, width: int, experts: int) -> Narrow | Wide:
        return choose_grouped(max(1, -(-rows // experts)), out, width, experts)

    return replace(
        INTEGERS,
        quantise=norm_quant.quantise_rows,
        norm=norm_quant.rms_norm_quant,
        swiglu=norm_quant.swiglu_quant,
        product=lambda rows, weights: int8_gemm(*rows, *weights, arrived=arrived),
        groups=groups,
        grouped=grouped,
        sort=permute.sort_by_expert,
        permute=permute.permute,
        unpermute=permute.unpermute,
    )


def _e4m3_fused() -> QuantizedOps:
    from tripool.kernels.triton import norm_quant, permute

    return replace(
        FLOATS,
        quantise=partial(norm_quant.quantise_rows, dtype=fp8.E4M3),
        norm=partial(norm_quant.rms_norm_quant, dtype=fp8.E4M3),
        swiglu=partial(norm_quant.swiglu_quant, dtype=fp8.E4M3),
        product=_scaled_mm,
        grouped=_scaled_grouped_mm,
        sort=permute.sort_by_expert,
        permute=permute.permute,
        unpermute=permute.unpermute,
    )
