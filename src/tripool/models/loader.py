"""Reads a checkpoint's tensors straight into their final, fused location: each weight exists once in memory.

If the weight store has the packed tensors already, nothing is read: the tensors to pack have a shape and no bytes
(torch's `meta` device).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from tripool.checkpoints import Checkpoint
from tripool.checkpoints.base import check_shape
from tripool.errors import TensorMissing
from tripool.kernels import KernelTable
from tripool.kernels.ops import LinearOp
from tripool.kernels.weight_store import FRESH, WeightStore


class Packed(Protocol):
    @property
    def num_bytes(self) -> int: ...


Op = TypeVar("Op", bound=Packed)


class Source(Protocol):
    """Source of tensors: a checkpoint, or none if the weight store has them."""

    device: str

    def has(self, name: str) -> bool: ...
    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor exists in this shape. Called before memory is allocated: shapes come from the
        config.
        """

    def read(self, name: str, out: torch.Tensor) -> None: ...
    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        """See `Checkpoint.row_scales`; None if the tensor is not stored in this 8-bit type."""


class FromCheckpoint:
    """Tensors of a checkpoint, on the device where they are packed: a GPU takes them as stored and converts them.

    `progress` takes a line of text whenever another percent is read.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str = "cpu", progress: Callable[[str], None] | None = None
    ) -> None:
        self.device, self._progress = device, progress
        self._checkpoint, self._infos = checkpoint, checkpoint.infos()
        self._num_weights = sum(math.prod(info.shape) for info in self._infos.values())
        self._num_read = 0

    def has(self, name: str) -> bool:
        return name in self._infos

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._infos:
            hint = "the checkpoint is incomplete or of another architecture; fetch it again"
            problem, file = "a tensor that the config requires is missing", self._checkpoint.path
            raise TensorMissing(problem, hint=hint, tensor=name, file=file)
        check_shape(self._checkpoint.path, name, self._infos[name].shape, shape)

    def read(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.read(name, out)
        if self._progress is not None:
            before, self._num_read = self._num_read, self._num_read + out.numel()
            percent = 100 * self._num_read // self._num_weights
            if percent > 100 * before // self._num_weights:
                bar = "█" * (percent // 5) + "░" * (20 - percent // 5)
                size = f"{percent} % of {self._checkpoint.stored_bytes() / 1e9:.1f} GB"
                self._progress(f"loading {self._checkpoint.name} {bar} {size}")

    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        stored = name in self._infos and self._infos[name].dtype == kind
        return self._checkpoint.row_scales(name) if stored else None


class Loader:
    def __init__(self, source: Source, kernels: KernelTable, dtype: torch.dtype, store: WeightStore = FRESH) -> None:
        self._source, self._dtype, self._store = source, dtype, store
        self.kernels = kernels if store is FRESH or kernels.over is None else kernels.over(store)
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(
        self,
        name: str,
        *shape: int,
        then: Callable[[torch.Tensor], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor used as stored, after `then` modified it. `dtype`: if not the network's."""

        def read() -> torch.Tensor:
            self._source.expect(name, shape)
            out = self._blank(*shape, dtype=dtype)
            self._source.read(name, out)
            if then is not None:
                then(out)
            return out

        out = self._store.keep(name, read)
        self.num_bytes += out.nbytes
        return out

    def derived(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A computed tensor, such as a table, that does not count as a weight."""
        return self._store.keep(label, make)

    def fused(self, names: Sequence[str], outs: Sequence[int], width: int) -> torch.Tensor:
        """Weights of layers that read the same input, stacked: one wide product instead of several narrow ones."""
        return self._stacked([f"{name}.weight" for name in names], outs, width)

    def scales(self, names: Sequence[str], outs: Sequence[int]) -> torch.Tensor | None:
        """Row scales of what `fused` returns for the same names (see `kernels/weights.py`)."""
        kind = self.kernels.stored
        if kind is None:
            return None
        found = [self._source.scales(f"{name}.weight", kind) for name in names]
        if all(one is None for one in found):
            return None
        blocks = next(one.shape[1:] for one in found if one is not None)
        parts = zip(found, outs, strict=True)
        return torch.cat([torch.zeros(out, *blocks) if one is None else one for one, out in parts])

    def bias(self, names: Sequence[str], outs: Sequence[int]) -> torch.Tensor:
        return self._stacked([f"{name}.bias" for name in names], outs)

    def _stacked(self, names: Sequence[str], outs: Sequence[int], *width: int) -> torch.Tensor:
        for name, rows in zip(names, outs, strict=True):
            self._source.expect(name, (rows, *width))
        stacked = self._blank(sum(outs), *width)
        for name, part in zip(names, stacked.split(list(outs)), strict=True):
            self._source.read(name, part)
        return stacked

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int) -> LinearOp:
        return self.pack(self.fused(names, outs, width), self.scales(names, outs))

    def pack(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> LinearOp:
        if scales is not None and self.kernels.linear_of_scales is not None:
            return self.counted(self.kernels.linear_of_scales(weight, scales))
        return self.counted(self.kernels.linear(weight, None))

    def experts(self, prefix: str, experts: int, width: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every expert's gate and up projections, stacked, and its down projection."""
        names = [f"{prefix}.{i}" for i in range(experts)]
        both = [f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")]
        gate_up = self._stacked(both, [width] * len(both), hidden)
        down = self._stacked([f"{name}.down_proj.weight" for name in names], [hidden] * experts, width)
        return gate_up.unflatten(0, (experts, -1)), down.unflatten(0, (experts, -1))

    def expert_scales(
        self, prefix: str, experts: int, width: int, hidden: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Row scales of what `experts` returns."""
        both, downs = [f"{prefix}.{{}}.gate_proj", f"{prefix}.{{}}.up_proj"], [f"{prefix}.{{}}.down_proj"]
        gate_up, down = (
            self.scales([name.format(i) for i in range(experts) for name in names], outs * experts)
            for names, outs in ((both, [width, width]), (downs, [hidden]))
        )
        by_expert = [None if one is None else one.unflatten(0, (experts, -1)) for one in (gate_up, down)]
        return by_expert[0], by_expert[1]

    def counted(self, op: Op) -> Op:
        """Count the op's packed weights as memory of the model."""
        self.num_bytes += op.num_bytes
        return op

    def _blank(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._source.device)
