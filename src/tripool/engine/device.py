"""An accelerator as an engine uses it: the device, the data type, its executor, and models loaded onto it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.cache.weight_cache import WeightCache
from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.config import Precision
from tripool.engine.device_executor import DeviceExecutor
from tripool.engine.device_memory import device_bytes, give_back, measured_bytes, within_memory
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.device_sampler import DeviceSampler
from tripool.engine.executor import Executor
from tripool.engine.memory import (
    CPU_STEP_TOKENS,
    LargestStep,
    default_step_tokens,
    kv_blocks,
    kv_blocks_beside,
    refused,
)
from tripool.engine.sampler import Guard, unguarded
from tripool.errors import NotExact, TripoolError
from tripool.kernels import KernelTable
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.cuda.table import cuda_table
from tripool.kernels.weights import E4M3, INT8
from tripool.models import Model
from tripool.models.arch import Arch
from tripool.models.load import Target
from tripool.models.warm import Loaded, load_warm
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
    whole_device: bool = False
    """Whether KV may take all memory that weights and the largest step leave."""
    exact: bool = False
    """Batch-invariant kernels (see `EngineConfig.exact`), which are Triton's: a CPU runs them in its interpreter."""

    def __post_init__(self) -> None:
        assert not (self.use_8_bit_products or self.exact) or self.dtype == torch.bfloat16

    def runner(self, model: Model, num_blocks: int, *, mtp: bool) -> DeviceRunner:
        return DeviceRunner(model, num_blocks=num_blocks, device=self.device, dtype=self.dtype, mtp=mtp)

    def step_tokens(self, arch: Arch) -> int:
        if self.device.type != "cuda":
            return CPU_STEP_TOKENS
        experts, top_k = (1, 1) if arch.moe is None else (arch.moe.experts, arch.moe.route.top_k)
        return default_step_tokens(device_bytes(self.device).total, experts, top_k)

    def kv_blocks(self, model: Model, kv_gb: float | None, largest: LargestStep, *, mtp: bool) -> int:
        """`largest`: the largest step, which is run to see what it leaves, unless `kv_gb` gives the size."""
        arch = model.arch
        block_bytes = arch.block_bytes(mtp=mtp, itemsize=self.dtype.itemsize)
        if kv_gb is not None or not self.whole_device:
            return kv_blocks(block_bytes, arch.context_tokens, kv_gb)
        step_bytes = measured_bytes(
            lambda: self.run_largest(self.executor(model, 1, mtp=mtp, guard=unguarded), largest), self.device
        )
        return kv_blocks_beside(step_bytes, device_bytes(self.device), block_bytes)

    def run_largest(self, executor: Executor, largest: LargestStep) -> None:
        """See `DeviceRunner.run_largest`; here with the memory that sampling takes."""
        assert isinstance(executor, DeviceExecutor)
        give_back()
        with within_memory(f"a step of {largest.step_tokens} tokens", self.device):
            logits = executor.runner.run_largest(largest)
            executor.sampler.chosen(logits, [1.0] * len(logits), torch.ones(len(logits), dtype=torch.int64))

    def executor(self, model: Model, num_blocks: int, *, mtp: bool, guard: Guard) -> DeviceExecutor:
        kv_bytes = (num_blocks + 1) * model.arch.block_bytes(mtp=mtp, itemsize=self.dtype.itemsize)
        with within_memory("KV memory", self.device, kv_bytes):
            runner = self.runner(model, num_blocks, mtp=mtp)
        sampler = DeviceSampler(model.arch.vocab, self.device)
        return DeviceExecutor(runner, sampler, mtp=mtp, guard=guard)


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
    loaded = load_warm_on(device_spec, model, None, progress)
    return loaded.name, loaded.text, loaded.network


def load_warm_on(
    device_spec: DeviceSpec,
    model: str,
    weight_cache: WeightCache | None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """As `load_warm`, onto the device. Refuses weights that do not fit before any is read."""
    device, dtype = device_spec.device, device_spec.dtype
    with open_checkpoint(model, progress=progress) as checkpoint:
        table = table_of(device_spec, checkpoint)
        needed_bytes = sum(
            math.prod(info.shape) * (1 if info.dtype == table.stored else dtype.itemsize)
            for info in checkpoint.infos().values()
        )
    if device.type == "cuda" and needed_bytes > device_bytes(device).free:
        raise refused(f"the weights of {model}", needed_bytes, device_bytes(device))
    with within_memory(f"the weights of {model}", device, needed_bytes):
        return load_warm(model, Target(table, dtype, device), weight_cache, progress)
