"""Assembles a colocated server: engines, admission control, access control and HTTP on one listening socket.

Prefill and decode share an engine, which a thread of this process drives; on a GPU it has a process of its own.

    with build_colocated(["tiny"]) as server:
        server.run()

With one model the engine stays for as long as the server does. With several, or with a memory budget, a `ModelManager`
loads and unloads them.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tripool.config import AdmissionConfig, EngineConfig, GatewayConfig
from tripool.control.model_policy import ModelPolicy
from tripool.engine.backend import EngineBackend
from tripool.engine.memory import CPU_STEP_TOKENS, MOST_STEP_TOKENS
from tripool.engine.process import EngineProcess
from tripool.engine.thread import EngineThread
from tripool.engine.wire import EngineReady, OpenEngine
from tripool.engine_protocol import StepEngine
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.app import create_models_app
from tripool.gateway.auth import Access
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.grpc.port import reserved
from tripool.gateway.model_manager import ManagedBackend, ModelManager
from tripool.gateway.models import Models, Served, check_names
from tripool.gateway.server import Server, listen
from tripool.router.admission_types import Capacity
from tripool.router.rate_limiter import RateLimiter
from tripool.serving.access import AccessConfig
from tripool.serving.server import BuiltServer
from tripool.serving.versions import RegistrySource, add_versions
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.tenants import Tenant
from tripool.text import Tokenizer
from tripool.text.files import TextFiles

if TYPE_CHECKING:
    from tripool.checkpoints import Registered

_CLOSE_S = 10.0
_QUEUE_STEPS, _AHEAD_STEPS = 512, 4
"""Full steps whose tokens may wait for admission, and be admitted without a first token."""
_ENGINE_COMMAND = (sys.executable, "-m", "tripool", "engine")

Load = Callable[[str, EngineConfig], StepEngine]
"""From a model's name or path to an engine."""


class Engines(Protocol):
    """The engines of a server: an `EngineBackend`, or the `ModelManager` of several."""

    def end(self) -> None:
        """End open answers with an error, without blocking."""

    def close(self, timeout_s: float) -> object:
        """Stop all engines; called after the event loop has ended."""


class ColocatedServer(BuiltServer):
    """A server that starts and ends its engines. `run` also ends by SIGINT and SIGTERM."""

    def __init__(
        self,
        models: Models,
        engines: Engines,
        listener: socket.socket,
        gateway: GatewayConfig,
        *,
        access: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: ConnectionLimits | None = None,
        on_ready: Callable[[], object] = lambda: None,
        grpc_address: str | None = None,
    ) -> None:
        super().__init__(listener, grpc_address)
        self.models, self.access = models, access
        self.engine: EngineReady | None = None
        """Of a server with one model."""
        self.app = create_models_app(models, gateway, clock=clock, access=access)
        self.engines, self._on_ready = engines, [on_ready]
        self._server = Server(
            self.app, on_ready=self._ready, end_answers=engines.end, limits=limits, grpc_address=grpc_address
        )

    def _ready(self) -> None:
        for on_ready in self._on_ready:
            on_ready()

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        self._on_ready.append(on_ready)
        self._server.run([self.listener])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        try:
            self.engines.close(_CLOSE_S)
        finally:
            super().close()


def build_colocated(
    models: Sequence[str] = ("tiny",),
    engine: EngineConfig | None = None,
    gateway: GatewayConfig | None = None,
    *,
    access: AccessConfig | None = None,
    weights: WeightCacheConfig | None = None,
    memory_gb: float | None = None,
    load: Load | None = None,
    engine_command: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ColocatedServer:
    """Bind the port, check access, load the first model. The first of `models` is the default.

    `memory_gb` bounds the weights and KV of all models together. `load` replaces the loading of checkpoints.
    `engine_command` starts processes for the engines; without it they have them on a GPU only.
    """
    engine, gateway, weights = engine or EngineConfig(), gateway or GatewayConfig(), weights or WeightCacheConfig()
    if engine_command is None and load is None and engine.device == "cuda":
        engine_command = _ENGINE_COMMAND
    versioned = _versioned(models) if load is None else {}
    models = [versioned[one].pinned if one in versioned else one for one in models]
    several = len(models) > 1 or memory_gb is not None or bool(versioned)
    with ExitStack() as stack:
        # Bound before a model is loaded: a taken port is an error at once.
        listener = stack.enter_context(listen(gateway.host, gateway.port))
        grpc_address = stack.enter_context(reserved(gateway.host, gateway.grpc_port))
        # One model alone would only pay for a copy of its weights that no second process maps.
        cached = weights.opened() if several or weights.requested else nullcontext()
        weight_cache = stack.enter_context(cached)
        opened = stack.enter_context(closing((access or AccessConfig()).open_for(listener)))

        def open_engine(model: str) -> _LoadedEngine:
            if engine_command is not None:
                cache = ("", 0) if weight_cache is None else (str(weight_cache.folder), weight_cache.quota_bytes)
                opened = OpenEngine(model, engine, *cache, several)
                process = EngineProcess(opened, engine_command, progress=progress)
                return _LoadedEngine(process, process.ready)
            if load is not None:
                return _in_thread(load(model, engine))
            from tripool.engine.load import load_engine  # here: torch takes seconds to import

            return _in_thread(
                load_engine(model, engine, progress=progress, weight_cache=weight_cache, shares_device=several)
            )

        if several:
            budget = None if memory_gb is None else int(memory_gb * 2**30)
            known = {one.name: (one, model) for one, model in _described(models, engine)}
            by_number = {found.version().label: found for found in versioned.values()}
            server = _managed_server(
                known, budget, open_engine, engine, listener, gateway, opened, by_number, grpc_address=grpc_address
            )
        else:
            server = _one_model_server(
                open_engine(models[0]),
                listener,
                gateway,
                access=opened,
                slots=engine.max_running,
                grpc_address=grpc_address,
            )
        server.closing = stack.pop_all()
    return server


@dataclass(frozen=True, slots=True)
class _LoadedEngine:
    """A `LoadedModel`: an engine and what drives it."""

    backend: EngineBackend
    facts: EngineReady

    @property
    def num_bytes(self) -> int:
        return self.facts.weight_bytes + self.facts.kv_bytes

    @property
    def from_memory(self) -> bool:
        return self.facts.from_weight_cache

    def close(self, timeout_s: float) -> bool:
        return self.backend.close(timeout_s)


def _admission(step_tokens: int) -> AdmissionConfig:
    """Bounds that follow how fast the engine is, of which the tokens of a step are a measure: 512 on a CPU.

    An engine that submits a step before the last one is settled needs the prompts of two more while a first token is on
    its way to admission control and the next prompt back."""
    usual = AdmissionConfig()
    queue_tokens = max(usual.queue_tokens, _QUEUE_STEPS * step_tokens)
    return AdmissionConfig(queue_tokens=queue_tokens, wide_tokens=max(usual.wide_tokens, _AHEAD_STEPS * step_tokens))


def _in_thread(engine: StepEngine, clock: Callable[[], float] = time.monotonic) -> _LoadedEngine:
    return _LoadedEngine(EngineThread(engine, clock=clock), EngineReady.of(engine))


# ---- one model ---------------------------------------------------------------------------------------------------


def engine_server(
    engine: StepEngine,
    listener: socket.socket,
    gateway: GatewayConfig | None = None,
    *,
    access: Access | None = None,
    slots: int | None = None,
    admission: AdmissionConfig | None = None,
    tenant_of: Callable[[str], Tenant] | None = None,
    clock: Callable[[], float] = time.monotonic,
    limits: ConnectionLimits | None = None,
    grpc_address: str | None = None,
) -> ColocatedServer:
    """A server over an engine that exists already. `slots`: how many choices the engine computes at a time.

    Without `access` the server is open to all that reach it, and `tenant_of` finds the limits of tenants.
    """
    return _one_model_server(
        _in_thread(engine, clock),
        listener,
        gateway,
        access=access,
        slots=slots,
        admission=admission,
        tenant_of=tenant_of,
        clock=clock,
        limits=limits,
        grpc_address=grpc_address,
    )


def _one_model_server(
    loaded: _LoadedEngine,
    listener: socket.socket,
    gateway: GatewayConfig | None = None,
    *,
    access: Access | None,
    slots: int | None,
    admission: AdmissionConfig | None = None,
    tenant_of: Callable[[str], Tenant] | None = None,
    clock: Callable[[], float] = time.monotonic,
    limits: ConnectionLimits | None = None,
    grpc_address: str | None,
) -> ColocatedServer:
    engine = loaded.facts
    capacity, admission = Capacity(slots=slots), admission or _admission(engine.step_tokens)
    tenant_of = access.tenant_named if access is not None else tenant_of
    backend = AdmissionBackend(loaded.backend, admission, room=lambda: capacity, tenant_of=tenant_of)
    models = Models([Served(engine.name, backend, Tokenizer(engine.text))])
    server = ColocatedServer(
        models,
        loaded.backend,
        listener,
        gateway or GatewayConfig(),
        access=access,
        clock=clock,
        limits=limits,
        grpc_address=grpc_address,
    )
    server.engine = engine
    return server


# ---- several models, or versions of them ----------------------------------------------------------------------------


def _versioned(models: Sequence[str]) -> dict[str, Registered]:
    """Of these, the names of a registry that name no version: the server follows what is published."""
    from tripool.checkpoints import registered  # here: torch takes seconds to import

    found = {model: registered(model) for model in models}
    return {model: one for model, one in found.items() if one is not None and one.number is None}


@dataclass(frozen=True, slots=True)
class _Description:
    """A model before it is loaded."""

    name: str
    text: TextFiles
    context_tokens: int
    num_bytes: int
    """Weights and KV, about."""


def _described(models: Sequence[str], config: EngineConfig) -> list[tuple[_Description, str]]:
    known = [(_describe(model, config), model) for model in models]
    check_names([one.name for one, _ in known])
    return known


def _describe(model: str, config: EngineConfig) -> _Description:
    from tripool.checkpoints import open_checkpoint
    from tripool.engine.memory import kv_blocks
    from tripool.kernels import CPU, CPU8
    from tripool.kernels.cpu8.library import variants
    from tripool.models.load import read_arch
    from tripool.models.warm import weight_bytes

    with open_checkpoint(model) as checkpoint:
        arch = read_arch(checkpoint)
        mtp = config.mtp and arch.mtp_layers > 0
        block_bytes = arch.block_bytes(mtp=mtp)
        kv_bytes = kv_blocks(block_bytes, arch.context_tokens, config.kv_gb) * block_bytes
        kernels = CPU8 if config.precision == "int8" and variants() else CPU
        num_bytes = weight_bytes(checkpoint, kernels) + kv_bytes
        return _Description(checkpoint.name, checkpoint.text, arch.context_tokens, num_bytes)


def _managed_server(
    known: dict[str, tuple[_Description, str]],
    budget: int | None,
    open_engine: Callable[[str], _LoadedEngine],
    config: EngineConfig,
    listener: socket.socket,
    gateway: GatewayConfig,
    access: Access,
    versioned: Mapping[str, Registered],
    *,
    grpc_address: str | None,
) -> ColocatedServer:
    """`known`: by name, with what `open_engine` takes. The first model is loaded here, the others when they fit.
    `versioned`: those whose other versions may be served, too.
    """

    def open_model(name: str) -> _LoadedEngine:
        return open_engine(known[name][1])

    policy = ModelPolicy({name: one.num_bytes for name, (one, _) in known.items()}, budget)
    manager = ModelManager(policy, open_model)
    first, *others = known
    manager.check_fits(first)
    began_s = time.monotonic()
    manager.add(first, open_model(first), time.monotonic() - began_s)
    rate_limiter, capacity = RateLimiter(), Capacity(slots=config.max_running)
    admission = _admission(config.step_tokens or (MOST_STEP_TOKENS if config.device == "cuda" else CPU_STEP_TOKENS))

    def serve(one: _Description) -> Served:
        backend = AdmissionBackend(
            ManagedBackend(manager, one.name, one.context_tokens),
            admission,
            rate_limiter=rate_limiter,
            room=lambda: capacity,
            tenant_of=access.tenant_named,
        )
        return Served(one.name, backend, Tokenizer(one.text))

    def serve_version(found: tuple[_Description, str]) -> Served:
        one, _ = found
        manager.know(one.name, one.num_bytes)
        known[one.name] = found
        return serve(one)

    models = Models([serve(one) for one, _ in known.values()], manager)
    following: list[asyncio.Task[None]] = []  # a task without a reference may be collected
    for label, found in versioned.items():
        source = RegistrySource(found, lambda model: (_describe(model, config), model), serve_version)
        add_versions(models, label, source, manager)

    def on_ready() -> None:
        for name in others:
            manager.prefer(name)
        loop = asyncio.get_running_loop()
        following.extend(loop.create_task(models.versioned(one.name).keep()) for one in versioned.values())

    return ColocatedServer(
        models,
        manager,
        listener,
        gateway,
        access=access,
        on_ready=on_ready,
        grpc_address=grpc_address,
    )
