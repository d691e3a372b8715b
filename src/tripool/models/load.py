"""Loads a network from an open checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tripool.checkpoints import Checkpoint
from tripool.errors import WrongArchitecture
from tripool.kernels import CPU, KernelTable
from tripool.kernels.heap import give_back
from tripool.kernels.weight_store import FRESH, WeightStore
from tripool.models import deepseek, llama, qwen
from tripool.models.arch import Arch, ConfigReader
from tripool.models.decoder import Model
from tripool.models.loader import FromCheckpoint, Loader, Source

FAMILIES: dict[str, Callable[[ConfigReader], Arch]] = {
    kind: family.read_arch for family in (llama, qwen, deepseek) for kind in family.MODEL_TYPES
}


def read_arch(checkpoint: Checkpoint) -> Arch:
    return arch_of(checkpoint.config, str(checkpoint.path))


def arch_of(config: Mapping[str, Any], file: str) -> Arch:
    """`file`: named in the error if the config cannot be used."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = f"this version runs {', '.join(sorted(FAMILIES))}"
        raise WrongArchitecture(f"model_type is {str(kind)[:100]!r}", hint=hint, file=file)
    return FAMILIES[kind](ConfigReader(config, file))


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a network is loaded."""

    kernels: KernelTable
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    """Weights are packed there and stay there. None: this machine's own memory."""

    def source(self, checkpoint: Checkpoint, progress: Callable[[str], None] | None = None) -> FromCheckpoint:
        return FromCheckpoint(checkpoint, "cpu" if self.device is None else str(self.device), progress)

    def loader(self, source: Source, host: WeightStore) -> Loader:
        """`host`: the weight store in this machine's memory."""
        if self.device is None:
            return Loader(source, self.kernels, self.dtype, host)
        from tripool.kernels.cuda.table import OnDevice  # here: a CPU needs none of it

        return Loader(source, self.kernels, self.dtype, OnDevice(self.device, host))


@torch.inference_mode()
def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    *,
    kernels: KernelTable = CPU,
    store: WeightStore = FRESH,
) -> Model:
    return _loaded(checkpoint, Loader(FromCheckpoint(checkpoint), kernels, dtype, store))


@torch.inference_mode()
def load_to(
    target: Target, checkpoint: Checkpoint, host: WeightStore, progress: Callable[[str], None] | None = None
) -> Model:
    return _loaded(checkpoint, target.loader(target.source(checkpoint, progress), host))


def _loaded(checkpoint: Checkpoint, loader: Loader) -> Model:
    model = Model(read_arch(checkpoint), loader)
    give_back()
    return model
