"""From a model's name to a running engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from tripool.cache.weight_cache import WeightCache
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.overlapped import OverlappedEngine
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
) -> Engine:
    """Weights are mapped from `weight_cache` if they are in it, and written to it if not. `hands_over`: sequences come
    from other engines or go to them, between two steps."""
    if config.device == "cuda":
        from tripool.engine.device import cuda_spec, load_on  # here: a CPU needs none of it

        device_spec = cuda_spec(config.precision, exact=config.exact)
        name, text, network = load_on(device_spec, model, progress)
        # Drafts depend on settled tokens, and so do sequences that change engines.
        overlaps = not hands_over and not (config.mtp and network.mtp is not None)
        engine = (OverlappedEngine if overlaps else Engine)(name, network, text, config, device_spec)
        engine.warm(progress)
        return engine
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
