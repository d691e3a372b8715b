"""From a model's name to a running engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tripool.cache.weight_cache import WeightCache
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.errors import NotExact
from tripool.kernels import CPU, CPU8
from tripool.kernels.cpu8.library import set_threads, variants
from tripool.models.warm import load_warm

_LOG = logging.getLogger("tripool")
_MISSING = (
    "tripool: computing in float32: no 8-bit kernels for this CPU were compiled when this was installed. "
    "Install a C compiler and then the package again; `tripool doctor` says more."
)


def load_engine(
    model: str,
    config: EngineConfig,
    *,
    progress: Callable[[str], None] | None = None,
    weight_cache: WeightCache | None = None,
    hands_over: bool = False,
    shares_device: bool = False,
) -> Engine:
    """Weights come from `weight_cache` if they are in it, and are written to it if not. `hands_over`: sequences go to
    other engines after their first token. `shares_device`: other engines have their memory on the same GPU."""
    if config.device == "cuda":
        return _load_on_cuda(model, config, progress, weight_cache, hands_over, shares_device)
    use_8_bit_products = config.precision == "int8" and bool(variants())
    if config.exact and not use_8_bit_products:
        hint = "on a CPU only int8 is exact, and its kernels must have been compiled: see `tripool doctor`"
        raise NotExact("products in float32 change their last bits with the batch", hint=hint)
    if config.precision == "int8" and not use_8_bit_products:
        _LOG.warning(_MISSING)  # on stderr, also without a logging configuration
    threads = config.threads or len(os.sched_getaffinity(0))
    if use_8_bit_products:
        set_threads(threads)
    # The 8-bit kernels have threads of their own; torch's would only spin beside them.
    torch.set_num_threads(1 if use_8_bit_products else threads)
    loaded = load_warm(model, CPU8 if use_8_bit_products else CPU, weight_cache, progress)
    engine = Engine(loaded.name, loaded.network, loaded.text, config)
    engine.from_weight_cache = loaded.from_memory
    return engine


def _load_on_cuda(
    model: str,
    config: EngineConfig,
    progress: Callable[[str], None] | None,
    weight_cache: WeightCache | None,
    hands_over: bool,
    shares_device: bool,
) -> Engine:
    with _stage("device"):
        from tripool.engine.device import cuda_spec, load_warm_on  # here: a CPU needs none of it
        from tripool.engine.device_executor import DeviceExecutor
        from tripool.engine.device_memory import within_memory
        from tripool.engine.overlapped import OverlappedEngine

        device_spec = replace(cuda_spec(config.precision, exact=config.exact), whole_device=not shares_device)
        with within_memory("the GPU itself", device_spec.device):
            torch.zeros(1, device=device_spec.device)  # opens it
    with _stage("weights") as facts:
        loaded = load_warm_on(device_spec, model, weight_cache, progress)
        torch.cuda.synchronize(device_spec.device)
        facts.update(bytes=loaded.network.num_bytes, from_weight_cache=loaded.from_memory)
    if progress:
        progress("measuring the largest step")
    kind = Engine if hands_over else OverlappedEngine  # a sequence that runs ahead cannot leave
    with _stage("kv") as facts:
        engine = kind(loaded.name, loaded.network, loaded.text, config, device_spec)
        engine.from_weight_cache = loaded.from_memory
        facts.update(bytes=engine.kv_bytes, step_tokens=engine.step_tokens)
    with _stage("warm-up") as facts:
        engine.warm(progress)
        assert isinstance(engine.executor, DeviceExecutor)
        facts.update(capture_s=round(engine.executor.runner.capture_s, 3))
    return engine


@contextmanager
def _stage(name: str) -> Iterator[dict[str, Any]]:
    """Logs how long a stage of the start took, with the facts that were put into the result."""
    facts: dict[str, Any] = {}
    began_s = time.perf_counter()
    yield facts
    _LOG.info("start", extra={"stage": name, "took_s": round(time.perf_counter() - began_s, 3), **facts})
