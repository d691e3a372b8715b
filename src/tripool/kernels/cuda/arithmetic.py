"""8-bit arithmetic: int8 scaled by row and channel, e4m3 scaled by DeepSeek's blocks (`ref/fp8`).

`fused`: with Triton kernels, which need a CUDA device (or Triton's interpreter); otherwise the same arithmetic in small
steps on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tripool.kernels.cuda.quantized_linear import QuantizedOps
from tripool.kernels.ref import fp8, w8a8
from tripool.kernels.ref.w8a8 import Rows8
from tripool.kernels.weights import E4M3, INT8

Product = Callable[[Rows8, Rows8], torch.Tensor]


def quantized_ops_of(
    stored: str, *, fused: bool, device: torch.device | str = "cpu", invariant: bool = False
) -> QuantizedOps:
    """`invariant`: a row's bits do not depend on the batch (only with `fused`)."""
    assert stored in (INT8, E4M3) and (fused or not invariant), stored
    if stored == INT8:
        ops = _integers_fused(torch.device(device)) if fused else INTEGERS
        # Integer sums are exact in any tiling. But of the kernels that add the product to something, which are chosen
        # by the number of rows, some round in between and some do not.
        return replace(ops, add_product=None) if invariant else ops
    return _e4m3_fused(torch.device(device), invariant=invariant) if fused else FLOATS


def _packed_integers(steps: torch.Tensor) -> torch.Tensor:
    return steps.round().to(torch.int8)


def _packed_floats(steps: torch.Tensor) -> torch.Tensor:
    return steps.clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.E4M3)


def _one_by_one(
    product: Product, swiglu: Callable[[torch.Tensor], Rows8], rows: Rows8, experts: torch.Tensor,
    weights: torch.Tensor, gate_up: Rows8, down: Rows8, onto: torch.Tensor | None, also: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One expert after the other, over every row: nothing is read from the device, so this can be captured."""
    parts = torch.zeros(*experts.shape, down[0].shape[1], dtype=torch.bfloat16, device=rows[0].device)
    for expert in range(len(gate_up[0])):
        inner = swiglu(product(rows, (gate_up[0][expert], gate_up[1][expert])))
        out = product(inner, (down[0][expert], down[1][expert]))
        parts = torch.where((experts == expert)[..., None], out[:, None], parts)
    total = (parts.float() * weights[..., None]).sum(1)
    total = total if also is None else total + also.float()
    return total.to(torch.bfloat16) if onto is None else onto.copy_(total + onto.float())


def _integer_product(rows: Rows8, weights: Rows8) -> torch.Tensor:
    return w8a8.int8_gemm(*rows, *weights)


INTEGERS = QuantizedOps(
    stored=INT8,
    dtype=torch.int8,
    outs_multiple=8,
    pack=_packed_integers,
    quantise=w8a8.quantise_rows,
    norm=w8a8.rms_norm_quant,
    swiglu=w8a8.swiglu_quant,
    product=_integer_product,
    experts=partial(_one_by_one, _integer_product, w8a8.swiglu_quant),
)
FLOATS = QuantizedOps(
    stored=E4M3,
    dtype=fp8.E4M3,
    outs_multiple=1,
    pack=_packed_floats,
    quantise=fp8.quantise_rows,
    norm=fp8.rms_norm_quant,
    swiglu=fp8.swiglu_quant,
    product=fp8.gemm,
    experts=partial(_one_by_one, fp8.gemm, fp8.swiglu_quant),
)


def _integers_fused(device: torch.device) -> QuantizedOps:
    from tripool.kernels.triton import norm_quant, permute
    from tripool.kernels.triton.expert_blocks import sort_and_plan
    from tripool.kernels.triton.grouped_gemm import choose_grouped, grouped_gemm
    from tripool.kernels.triton.int8_gemm import arrivals, int8_gemm

    arrived = arrivals(device)

    def experts(
        rows: Rows8, chosen: torch.Tensor, weights: torch.Tensor, gate_up: Rows8, down: Rows8,
        onto: torch.Tensor | None, also: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Sorts rows by expert; the host never reads how many each expert got. The block height of the plan follows
        from the numbers of rows and experts, so that one plan serves both products."""
        count, pairs = len(gate_up[0]), chosen.numel()
        expected = max(1, -(-pairs // count))
        tilings = [choose_grouped(expected, one.shape[1], one.shape[2], count) for one in (gate_up[0], down[0])]
        expert_order, plan = sort_and_plan(chosen, count, tilings[0])
        moved = permute.permute(*rows, expert_order)
        assert tilings[1].block_m == tilings[0].block_m
        inner = norm_quant.swiglu_quant(grouped_gemm(*moved, *gate_up, plan, arrived=arrived))
        parts = grouped_gemm(*inner, *down, replace(plan, tiling=tilings[1]), arrived=arrived)
        return permute.unpermute(parts, weights, expert_order, onto, also)

    return replace(
        INTEGERS,
        quantise=norm_quant.quantise_rows,
        norm=norm_quant.rms_norm_quant,
        swiglu=norm_quant.swiglu_quant,
        product=lambda rows, weights: int8_gemm(*rows, *weights, arrived=arrived),
        add_product=lambda x, rows, weights: int8_gemm(*rows, *weights, x, arrived, add=True),
        experts=experts,
    )


def _e4m3_fused(device: torch.device, *, invariant: bool) -> QuantizedOps:
    """All tilings of routed experts are batch-invariant in e4m3: each has a depth of 128."""
    from tripool.kernels.triton import norm_quant
    from tripool.kernels.triton.experts import routed_experts
    from tripool.kernels.triton.fp8_gemm import block_gemm, choose_blocks, choose_invariant
    from tripool.kernels.triton.int8_gemm import arrivals

    return replace(
        FLOATS,
        quantise=partial(norm_quant.quantise_rows, dtype=fp8.E4M3),
        norm=partial(norm_quant.rms_norm_quant, dtype=fp8.E4M3),
        swiglu=partial(norm_quant.swiglu_quant, dtype=fp8.E4M3),
        product=partial(block_gemm, arrived=arrivals(device), choose=choose_invariant if invariant else choose_blocks),
        experts=routed_experts,
    )
