"""From an open checkpoint to a network, or a typed error and nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tripool.checkpoints import Checkpoint
from tripool.errors import WrongArchitecture
from tripool.kernels import CPU, KernelTable
from tripool.models import deepseek, llama, qwen
from tripool.models.arch import Arch, ConfigReader
from tripool.models.decoder import Model
from tripool.models.loader import Loader

FAMILIES: dict[str, Callable[[ConfigReader], Arch]] = {
    kind: family.read_arch for family in (llama, qwen, deepseek) for kind in family.MODEL_TYPES
}


def read_arch(checkpoint: Checkpoint) -> Arch:
    config = checkpoint.config
    kind = config.get("model_type")
    if kind not in FAMILIES:
        hint = f"this version runs {', '.join(sorted(FAMILIES))}"
        raise WrongArchitecture(f"model_type is {kind!r}", hint=hint, file=checkpoint.path)
    return FAMILIES[kind](ConfigReader(config, str(checkpoint.path)))


@torch.inference_mode()
def load_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, *, kernels: KernelTable = CPU) -> Model:
    return Model(read_arch(checkpoint), Loader(checkpoint, kernels, dtype))
