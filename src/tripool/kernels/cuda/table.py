"""The CUDA table, by the type it computes in.

`fused`: with Triton kernels, which need a CUDA device. `quantized`: weights that a checkpoint stores in 8 bits are
multiplied in them (see `quantized_linear.py`); without it they are dequantized when they are loaded. `invariant`: the
exact mode, in which a row's bits do not depend on the batch (`quantized` must then be invariant, too). `over` is for
weight stores that move tensors to a device: what they keep depends on scales, which the weight cache does not record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tripool.kernels.cuda import attention_sublayers, mlp
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.cuda.make import Make
from tripool.kernels.cuda.quantized_linear import QuantizedOps
from tripool.kernels.table import KernelTable
from tripool.kernels.weight_store import FRESH, WeightStore


class OnDevice:
    """A weight store that stores nothing and sends every tensor to one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make().to(self.device)


def cuda_table(
    dtype: torch.dtype,
    *,
    fused: bool,
    quantized: QuantizedOps | None = None,
    invariant: Invariant | None = None,
    store: WeightStore = FRESH,
) -> KernelTable:
    make = Make(store, dtype, fused and dtype == torch.bfloat16, quantized, invariant)
    return KernelTable(
        name=f"cuda-{str(dtype).removeprefix('torch.')}{f'-{quantized.stored}' if quantized else ''}",
        rms_norm=make.rms_norm(),
        linear=make.linear,
        join=partial(mlp.Join, make),
        gqa=partial(attention_sublayers.GroupedAttention, make),
        mla=partial(attention_sublayers.LatentAttention, make),
        mlp=partial(mlp.Mlp, make),
        moe=partial(mlp.MoeMlp, make),
        draft=attention_sublayers.Draft,
        over=lambda other: cuda_table(dtype, fused=fused, quantized=quantized, invariant=invariant, store=other),
        linear_of_scales=None if quantized is None else lambda weight, scales: make.linear(weight, None, scales),
        stored=quantized.stored if quantized else None,
    )
