"""From a model's name to a running engine."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.kernels import CPU, CPU8
from tripool.kernels.cpu8.library import set_threads, variants
from tripool.models import load_model


def load_engine(model: str, config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> Engine:
    eight_bits = config.precision == "int8" and bool(variants())
    threads = config.threads or len(os.sched_getaffinity(0))
    if eight_bits:
        set_threads(threads)
    # The 8-bit kernels have threads of their own; torch's would only spin beside them.
    torch.set_num_threads(1 if eight_bits else threads)
    with open_checkpoint(model, progress=progress) as checkpoint:
        text = checkpoint.text  # first: cheap, and fails before gigabytes are read
        if progress:
            missing = config.precision == "int8" and not eight_bits
            note = " in float32: the 8-bit kernels were not compiled when this was installed" if missing else ""
            progress(f"loading {checkpoint.name}{note}")
        network = load_model(checkpoint, kernels=CPU8 if eight_bits else CPU)
        return Engine(checkpoint.name, network, text, config)
