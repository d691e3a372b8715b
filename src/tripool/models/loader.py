"""Reads a checkpoint's tensors straight into their final, fused place: each weight exists once in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from tripool.checkpoints import Checkpoint
from tripool.errors import TensorMissing
from tripool.kernels import KernelTable
from tripool.kernels.ops import LinearOp


class Packed(Protocol):
    @property
    def num_bytes(self) -> int: ...


Op = TypeVar("Op", bound=Packed)


class Loader:
    def __init__(self, checkpoint: Checkpoint, kernels: KernelTable, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._infos = checkpoint.infos()
        self._dtype = dtype
        self.kernels = kernels
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        return name in self._infos

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self._dtype)
        self.into(name, out)
        self.num_bytes += out.nbytes
        return out

    def into(self, name: str, out: torch.Tensor) -> None:
        if name not in self._infos:
            hint = "the checkpoint is incomplete or of another architecture; fetch it again"
            raise TensorMissing(
                "the config promises a tensor that is not there", hint=hint, tensor=name, file=self._path
            )
        self._checkpoint.read(name, out)

    def fused(self, names: Sequence[str], outs: Sequence[int], width: int) -> torch.Tensor:
        """Weights of layers that read the same input, stacked: one wide product instead of several narrow ones."""
        weight = torch.empty(sum(outs), width, dtype=self._dtype)
        for name, part in zip(names, weight.split(list(outs)), strict=True):
            self.into(f"{name}.weight", part)
        return weight

    def bias(self, names: Sequence[str], outs: Sequence[int]) -> torch.Tensor:
        bias = torch.empty(sum(outs), dtype=self._dtype)
        for name, part in zip(names, bias.split(list(outs)), strict=True):
            self.into(f"{name}.bias", part)
        return bias

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int) -> LinearOp:
        return self.pack(self.fused(names, outs, width))

    def pack(self, weight: torch.Tensor) -> LinearOp:
        return self.counted(self.kernels.linear(weight, None))

    def experts(self, prefix: str, experts: int, width: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every expert's gate and up projections, stacked, and its down projection."""
        gate_up = torch.empty(experts, 2 * width, hidden, dtype=self._dtype)
        down = torch.empty(experts, hidden, width, dtype=self._dtype)
        for i in range(experts):
            self.into(f"{prefix}.{i}.gate_proj.weight", gate_up[i, :width])
            self.into(f"{prefix}.{i}.up_proj.weight", gate_up[i, width:])
            self.into(f"{prefix}.{i}.down_proj.weight", down[i])
        return gate_up, down

    def counted(self, op: Op) -> Op:
        """What a table has packed counts as the model's memory."""
        self.num_bytes += op.num_bytes
        return op

    @property
    def _path(self) -> str:
        return str(self._checkpoint.path)
