"""An accelerator as an engine uses it: the device, the data type, its executor, and models loaded onto it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.config import Precision
from tripool.engine.device_executor import DeviceExecutor
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.device_sampler import DeviceSampler
from tripool.engine.executor import Executor, PlainExecutor
from tripool.engine.sampler import Guard
from tripool.errors import NotExact, TripoolError
from tripool.kernels import KernelTable
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.weights import E4M3, INT8
from tripool.models import Model, load_model
from tripool.text.files import TextFiles

HOPPER = 9
"""The major compute capability on which 8-bit products were measured; elsewhere weights are dequantised."""


class DeviceMissing(TripoolError):
    """The requested device does not exist, or torch cannot use it."""

    code = "device_missing"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    device: torch.device
    dtype: torch.dtype
    use_8_bit_products: bool = False
    """Whether weights that a checkpoint holds in 8 bits are multiplied in 8 bits. Results are in bfloat16."""
    exact: bool = False
    """Batch-invariant kernels (see `EngineConfig.exact`), which are Triton's: a CPU runs them in its interpreter."""

    def __post_init__(self) -> None:
        assert not (self.use_8_bit_products or self.exact) or self.dtype == torch.bfloat16

    def runner(self, model: Model, num_blocks: int, *, mtp: bool) -> DeviceRunner:
        return DeviceRunner(model, num_blocks=num_blocks, device=self.device, dtype=self.dtype, mtp=mtp)

    def executor(self, model: Model, num_blocks: int, *, mtp: bool, guard: Guard) -> Executor:
        runner, sampler = self.runner(model, num_blocks, mtp=mtp), DeviceSampler(model.arch.vocab, self.device)
        if mtp:
            return PlainExecutor(runner, sampler, mtp=True, guard=guard)
        return DeviceExecutor(runner, sampler, guard=guard)


def cuda_spec(precision: Precision, *, exact: bool = False) -> DeviceSpec:
    if not torch.cuda.is_available():
        hint = "run with --device cpu, or install a torch that was built for CUDA and check the driver"
        raise DeviceMissing("torch finds no CUDA device", hint=hint)
    on_hopper = torch.cuda.get_device_capability()[0] == HOPPER
    if exact and precision == "float32":
        hint = "run without --precision float32, or without --exact"
        raise NotExact("on CUDA products in float32 change their last bits with the batch", hint=hint)
    if exact and not on_hopper:
        name = torch.cuda.get_device_name()
        raise NotExact(f"the exact mode is written for Hopper, and this is {name}", hint="run without --exact")
    if precision == "float32":
        return DeviceSpec(torch.device("cuda"), torch.float32)
    return DeviceSpec(torch.device("cuda"), torch.bfloat16, use_8_bit_products=on_hopper, exact=exact)


def table_of(device_spec: DeviceSpec, checkpoint: Checkpoint) -> KernelTable:
    fused = device_spec.device.type == "cuda" or device_spec.exact
    kinds = (
        {info.dtype for info in checkpoint.infos().values()} & {INT8, E4M3} if device_spec.use_8_bit_products else ()
    )
    exact, device = device_spec.exact, device_spec.device
    quantized = next((quantized_ops_of(kind, fused=fused, device=device, invariant=exact) for kind in kinds), None)
    invariant = Invariant.on(device) if exact else None
    return cuda_table(device_spec.dtype, fused=fused, quantized=quantized, invariant=invariant)


def load_on(
    device_spec: DeviceSpec, model: str, progress: Callable[[str], None] | None = None
) -> tuple[str, TextFiles, Model]:
    with open_checkpoint(model, progress=progress) as checkpoint:
        text = checkpoint.text
        if progress:
            progress(f"loading {checkpoint.name}")
        table = table_of(device_spec, checkpoint)
        network = load_model(checkpoint, device_spec.dtype, kernels=table, store=OnDevice(device_spec.device))
        return checkpoint.name, text, network
