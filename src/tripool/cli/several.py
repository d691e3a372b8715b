"""Several models in one process: an engine thread for each that is in memory, one budget, one gateway before them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from tripool.config import EngineConfig, GatewayConfig
from tripool.control.model_policy import ModelPolicy
from tripool.engine.protocol import StepEngine

if TYPE_CHECKING:
    import socket

    from tripool.engine.thread import EngineThread
    from tripool.gateway.auth import Access
    from tripool.gateway.model_manager import ModelManager
    from tripool.gateway.models import Models
    from tripool.observe.log import Log
    from tripool.text.files import TextFiles

_LOG = logging.getLogger("tripool.serve")
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a model before it is loaded."""

    name: str
    text: TextFiles
    context_tokens: int
    num_bytes: int
    """Weights and KV, about."""


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: StepEngine
    from_memory: bool


Open = Callable[[str], Loaded]


@dataclass(frozen=True, slots=True)
class Threaded:
    """A `LoadedModel`: an engine and the thread that drives it."""

    backend: EngineThread
    num_bytes: int
    from_memory: bool

    def close(self, timeout_s: float) -> bool:
        return self.backend.close(timeout_s)


def describe(model: str, config: EngineConfig) -> Described:
    from tripool.checkpoints import open_checkpoint
    from tripool.core import BLOCK_TOKENS
    from tripool.engine.engine import kv_blocks
    from tripool.kernels import CPU, CPU8
    from tripool.kernels.cpu8.library import variants
    from tripool.models.load import read_arch
    from tripool.models.warm import weight_bytes

    with open_checkpoint(model) as checkpoint:
        arch = read_arch(checkpoint)
        mtp = config.mtp and arch.mtp_layers > 0
        block_bytes = (arch.layers + mtp) * BLOCK_TOKENS * arch.kv_width * 4
        kv_bytes = kv_blocks(arch, config, mtp=mtp) * block_bytes
        kernels = CPU8 if config.precision == "int8" and variants() else CPU
        num_bytes = weight_bytes(checkpoint, kernels) + kv_bytes
        return Described(checkpoint.name, checkpoint.text, arch.context_tokens, num_bytes)


def manager_of(paths: dict[str, str], known: Sequence[Described], budget: int | None, open_: Open) -> ModelManager:
    """`paths`: what `open_` is to be given for each name. The first model is opened here and now."""
    from tripool.engine.thread import EngineThread
    from tripool.gateway.model_manager import ModelManager

    def open_model(name: str) -> Threaded:
        loaded = open_(paths[name])
        num_bytes = loaded.engine.weight_bytes + loaded.engine.kv_bytes
        return Threaded(EngineThread(loaded.engine), num_bytes, loaded.from_memory)

    manager = ModelManager(ModelPolicy({one.name: one.num_bytes for one in known}, budget), open_model)
    first, began_s = known[0].name, time.monotonic()
    manager.check_fits(first)
    manager.add(first, open_model(first), time.monotonic() - began_s)
    return manager


def models_of(manager: ModelManager, known: Sequence[Described], config: EngineConfig, access: Access) -> Models:
    from tripool.gateway.admission import AdmissionBackend
    from tripool.gateway.model_manager import ManagedBackend
    from tripool.gateway.models import Models, Served
    from tripool.router.admission_types import Capacity
    from tripool.router.rate_limiter import RateLimiter
    from tripool.text import Tokenizer

    rate_limiter, room = RateLimiter(), Capacity(slots=config.max_running)
    served = []
    for one in known:
        backend = ManagedBackend(manager, one.name, one.context_tokens)
        admission = AdmissionBackend(
            backend, rate_limiter=rate_limiter, room=lambda: room, tenant_of=access.tenant_named
        )
        served.append(Served(one.name, admission, Tokenizer(one.text)))
    return Models(served, manager)


def serve_several(
    models: Sequence[str],
    config: EngineConfig,
    gateway: GatewayConfig,
    listener: socket.socket,
    log: Log,
    *,
    budget: int | None,
    access: Access,
    open_: Open,
    describe_: Callable[[str, EngineConfig], Described] = describe,
) -> None:
    from tripool.gateway.app import create_models_app
    from tripool.gateway.models import check_names
    from tripool.gateway.server import Server, url_of

    known = [describe_(model, config) for model in models]
    check_names([one.name for one in known])
    paths = {one.name: model for one, model in zip(known, models, strict=True)}
    manager = manager_of(paths, known, budget, open_)
    log.serving()

    def ready() -> None:
        for one in known[1:]:
            manager.prefer(one.name)
        typer.echo(_banner(url_of(listener), known, manager))
        _LOG.info("ready", extra={"url": url_of(listener), "keys": access.keys})

    try:
        application = create_models_app(models_of(manager, known, config, access), gateway, access=access)
        server = Server(application, on_ready=ready, end_answers=manager.end)
        server.run([listener])
    finally:
        manager.close(_CLOSE_S)


def _banner(url: str, known: Sequence[Described], manager: ModelManager) -> str:
    lines = [f"Tripool serves {len(known)} models at {url}/v1", ""]
    for one in known:
        told = manager.describe(one.name)
        default = ", default" if one is known[0] else ""
        lines.append(f"  {one.name}: {told['state']}{default}, {told['bytes'] / 1e6:,.0f} MB")
    body = f'{{"model": "{known[0].name}", "prompt": "Once upon a time"}}'
    curl = f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"
    return "\n".join([*lines, "", curl, "", "Ctrl-C stops it."])
