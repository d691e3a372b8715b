"""Loads a network from an open checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tripool.models.loader import FromCheckpoint, Loader

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


@torch.inference_mode()
def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    *,
    kernels: KernelTable = CPU,
    store: WeightStore = FRESH,
) -> Model:
    model = Model(read_arch(checkpoint), Loader(FromCheckpoint(checkpoint), kernels, dtype, store))
    give_back()
    return model
