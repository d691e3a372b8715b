"""Where an engine's tensors live when that is not this machine's own memory: one device and the type it computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import Precision
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.device_sampler import DeviceSampler
from tripool.errors import TripoolError
from tripool.kernels.cuda.shelf import OnDevice
from tripool.kernels.cuda.table import cuda_table
from tripool.models import Model, load_model
from tripool.text.files import TextFiles


class DeviceMissing(TripoolError):
    """The device that was asked for is not there, or torch cannot reach it."""

    code = "device_missing"


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    dtype: torch.dtype

    def runner(self, model: Model, num_blocks: int, *, mtp: bool) -> DeviceRunner:
        return DeviceRunner(model, num_blocks=num_blocks, device=self.device, dtype=self.dtype, mtp=mtp)

    def sampler(self, model: Model) -> DeviceSampler:
        return DeviceSampler(model.arch.vocab, self.device)


def cuda_place(precision: Precision) -> Place:
    if not torch.cuda.is_available():
        hint = "run with --device cpu, or install a torch that was built for CUDA and check the driver"
        raise DeviceMissing("torch finds no CUDA device", hint=hint)
    return Place(torch.device("cuda"), torch.float32 if precision == "float32" else torch.bfloat16)


def load_on(place: Place, model: str, progress: Callable[[str], None] | None = None) -> tuple[str, TextFiles, Model]:
    with open_checkpoint(model, progress=progress) as checkpoint:
        text = checkpoint.text
        if progress:
            progress(f"loading {checkpoint.name}")
        table = cuda_table(place.dtype, fused=place.device.type == "cuda")
        network = load_model(checkpoint, place.dtype, kernels=table, shelf=OnDevice(place.device))
        return checkpoint.name, text, network
