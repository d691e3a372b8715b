"""The CUDA table, by the type it computes in.

`fused`: with Triton kernels, for which a CUDA device is needed. `eight`: what a checkpoint holds in these eight bits is
multiplied in them (see `eight.py`); without it it is multiplied out when it is loaded. `over` is for shelves that send
things to a device: what is kept depends on the scales, which the model cache does not remember.
"""

from __future__ import annotations

from functools import partial

import torch

from tripool.kernels.cuda import elementwise, halves, mlp
from tripool.kernels.cuda.eight import Eight
from tripool.kernels.cuda.make import Make
from tripool.kernels.table import KernelTable
from tripool.kernels.weight_store import FRESH, WeightStore


def cuda_table(
    dtype: torch.dtype, *, fused: bool, eight: Eight | None = None, store: WeightStore = FRESH
) -> KernelTable:
    make = Make(store, dtype, fused and dtype == torch.bfloat16, eight)
    return KernelTable(
        name=f"cuda-{str(dtype).removeprefix('torch.')}{f'-{eight.stored}' if eight else ''}",
        rms_norm=elementwise.rms_norm,
        linear=make.linear,
        join=partial(mlp.Join, make),
        gqa=partial(halves.GroupedAttention, make),
        mla=partial(halves.LatentAttention, make),
        mlp=partial(mlp.Mlp, make),
        moe=partial(mlp.MoeMlp, make),
        draft=halves.Draft,
        over=lambda other: cuda_table(dtype, fused=fused, eight=eight, store=other),
        linear_of_scales=None if eight is None else lambda weight, scales: make.linear(weight, None, scales),
        stored=eight.stored if eight else None,
    )
