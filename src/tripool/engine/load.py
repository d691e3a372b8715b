"""From a model's name to a running engine."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.kernels import CPU, CPU8
from tripool.models import load_model


def load_engine(model: str, config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> Engine:
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    with open_checkpoint(model, progress=progress) as checkpoint:
        text = checkpoint.text  # first: cheap, and fails before gigabytes are read
        if progress:
            progress(f"loading {checkpoint.name}")
        network = load_model(checkpoint, kernels=CPU8 if config.precision == "int8" else CPU)
        return Engine(checkpoint.name, network, text, config)
