"""The CUDA table, by the type it computes in.

`fused`: with Triton kernels, which need a CUDA device. `quantized`: weights that a checkpoint stores in 8 bits are
multiplied in them (see `quantized_linear.py`); without it they are dequantized when they are loaded. `invariant`: the
exact mode, in which a row's bits do not depend on the batch (`quantized` must then be invariant, too).
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

_PIECE_BYTES = 64 * 2**20
"""Of an upload: bounds the pinned memory."""


class OnDevice:
    """A weight store that sends every tensor to one device, from `host` or on the way to it."""

    def __init__(self, device: torch.device | str, host: WeightStore = FRESH) -> None:
        self.device, self._host = torch.device(device), host

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._host is FRESH:
            return make().to(self.device)
        made: list[torch.Tensor] = []

        def on_host() -> torch.Tensor:
            made.append(make())
            return made[0].cpu()

        kept = self._host.keep(label, on_host)
        return made[0].to(self.device) if made else uploaded(kept, self.device)


def uploaded(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy, in pieces through pinned memory: the host reads the next piece while the device takes the last one."""
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    if not source.numel():
        return out
    pieces = (one.contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES) for one in (out, source))
    for target, piece in zip(*pieces, strict=True):
        target.copy_(piece.pin_memory() if device.type == "cuda" else piece, non_blocking=True)
    return out


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
        name=f"cuda{'' if fused else '-plain'}-{str(dtype).removeprefix('torch.')}"
        f"{f'-{quantized.stored}' if quantized else ''}{'-exact' if invariant else ''}",
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
