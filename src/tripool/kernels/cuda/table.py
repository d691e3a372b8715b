"""The CUDA table, by the type it computes in. `fused`: with Triton kernels, for which a CUDA device is needed."""

from __future__ import annotations

from functools import partial

import torch

from tripool.kernels.cuda import elementwise, halves
from tripool.kernels.cuda.experts import Experts
from tripool.kernels.cuda.linear import Linear
from tripool.kernels.ops import Ops
from tripool.kernels.ref import attention, mla, route
from tripool.kernels.ref.halves import Join, Mlp, MoeMlp
from tripool.kernels.shelf import FRESH, Shelf
from tripool.kernels.table import KernelTable


def cuda_table(dtype: torch.dtype, *, fused: bool, shelf: Shelf = FRESH) -> KernelTable:
    make = halves.Make(shelf, dtype, fused and dtype == torch.bfloat16)
    ops = Ops(
        rms_norm=elementwise.rms_norm,
        rope_=elementwise.rope_,
        swiglu=elementwise.swiglu,
        linear=make.linear,
        router=partial(Linear, shelf=shelf, dtype=torch.float32),
        experts=partial(Experts, shelf=shelf, dtype=dtype, fused=make.fused),
        route=route.route,
        attend_prompt=attention.attend_prompt,  # these three belong to halves of their own
        attend_decode=attention.attend_decode,
        mla=mla.Mla,
    )
    return KernelTable(
        name=f"cuda-{str(dtype).removeprefix('torch.')}",
        rms_norm=elementwise.rms_norm,
        linear=make.linear,
        join=partial(Join, ops),
        gqa=partial(halves.GroupedAttention, make),
        mla=partial(halves.LatentAttention, make),
        mlp=partial(Mlp, ops),
        moe=partial(MoeMlp, ops),
        draft=halves.Draft,
        over=lambda other: cuda_table(dtype, fused=fused, shelf=other),
    )
