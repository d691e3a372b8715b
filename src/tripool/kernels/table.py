"""The kernel table: one set of layer halves per kind of device, chosen once. Model code never asks where it runs.

A half takes the residual stream x [rows, hidden] and adds to it in place. `plain_table` makes a table from small ops
(see `tripool.kernels.ops`); a table may as well fuse a whole half into one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from tripool.kernels.batch import Batch
from tripool.kernels.cpu.ops import CPU_OPS
from tripool.kernels.ops import REFERENCE_OPS, LinearOp, Ops
from tripool.kernels.ref.halves import GroupedAttention, Join, LatentAttention, Mlp, MoeMlp
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights


class AttentionHalf(Protocol):
    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        """Writes the rows' KV into kv [slots, width], then attends; adds to x."""
        ...

    @property
    def num_bytes(self) -> int: ...


class MlpHalf(Protocol):
    def __call__(self, x: torch.Tensor) -> None: ...
    @property
    def num_bytes(self) -> int: ...


class JoinOp(Protocol):
    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KernelTable:
    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor | None], LinearOp]
    join: Callable[[JoinWeights], JoinOp]
    gqa: Callable[[GqaWeights], AttentionHalf]
    mla: Callable[[LatentWeights], AttentionHalf]
    mlp: Callable[[MlpWeights], MlpHalf]
    moe: Callable[[MoeWeights], MlpHalf]


def plain_table(name: str, ops: Ops) -> KernelTable:
    return KernelTable(
        name=name,
        rms_norm=ops.rms_norm,
        linear=ops.linear,
        join=partial(Join, ops),
        gqa=partial(GroupedAttention, ops),
        mla=partial(LatentAttention, ops),
        mlp=partial(Mlp, ops),
        moe=partial(MoeMlp, ops),
    )


REFERENCE = plain_table("reference", REFERENCE_OPS)
CPU = plain_table("cpu-float32", CPU_OPS)
