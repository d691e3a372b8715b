"""`tripool serve`: models and the OpenAI surface, in one process or (one model) split into pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool import __version__
from tripool.cli.access import Open, open_access, starts_open
from tripool.cli.disk import Disk, DiskDir, DiskGb, disk_of
from tripool.cli.keys import KeysFile
from tripool.cli.logs import LogFormat, LogLevel, LogOptions, ended_by_sigterm, logged
from tripool.cli.options import DeviceOf, KvGb, Load, MaxRunning, ModelNames, Mtp, PrecisionOf, Threads
from tripool.cli.terminal import load_model
from tripool.cli.weight_cache import KeepModels, ModelCacheGb, weight_cache
from tripool.config import EngineConfig, GatewayConfig
from tripool.engine.protocol import StepEngine
from tripool.errors import TripoolError

if TYPE_CHECKING:
    from tripool.observe.log import Log
    from tripool.text.files import TextFiles

_LOG = logging.getLogger("tripool.serve")
_CLOSE_S = 10.0
_CACHE_GB = 0.25
_ENGINE, _GATEWAY, _LOGS = EngineConfig(), GatewayConfig(), LogOptions()


@dataclass(frozen=True, slots=True)
class _AccessOptions:
    named: Path | None
    """The key book that `--keys` names."""
    may_be_open: bool

    @property
    def key_store(self) -> Path:
        from tripool.tenants.key_store import default_path

        return self.named or default_path()


@dataclass(frozen=True, slots=True)
class _Warm:
    """The model cache."""

    gb: float | None
    keep: bool

    @property
    def asked_for(self) -> bool:
        return self.keep or bool(self.gb)


class OneModelSplit(TripoolError):
    """Several models were asked of a split server."""

    status = 400
    code = "one_model_split"


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    def serve(
        models: ModelNames = None,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = _GATEWAY.host,
        port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = _GATEWAY.port,
        kv_gb: KvGb = None,
        max_running: MaxRunning = _ENGINE.max_running,
        mtp: Mtp = _ENGINE.mtp,
        precision: PrecisionOf = _ENGINE.precision,
        threads: Threads = None,
        device: DeviceOf = _ENGINE.device,
        split: Annotated[bool, typer.Option("--split", help="Prefill and decode in processes of their own.")] = False,
        prefill: Annotated[int | None, typer.Option(min=1, max=256, help="Prefill workers; implies --split.")] = None,
        decode: Annotated[int | None, typer.Option(min=1, max=256, help="Decode workers; implies --split.")] = None,
        cache_gb: Annotated[
            float | None, typer.Option("--cache-gb", min=0, help="Of the cache pool; 0.25 when split; implies --split.")
        ] = None,
        disk_gb: DiskGb = None,
        disk_dir: DiskDir = None,
        memory_gb: Annotated[
            float | None, typer.Option("--memory-gb", min=0.001, help="For several models together, weights and KV.")
        ] = None,
        model_cache_gb: ModelCacheGb = None,
        keep_models: KeepModels = False,
        keys: KeysFile = None,
        open: Open = False,
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve MODELS over HTTP: one, in one process or split, or several in one process."""
        access_options = _AccessOptions(keys, open)
        gateway = GatewayConfig(host=host, port=port)
        config = EngineConfig(
            kv_gb=kv_gb, max_running=max_running, mtp=mtp, precision=precision, threads=threads, device=device
        )
        models, warm = models or ["tiny"], _Warm(model_cache_gb, keep_models)
        logs = LogOptions(log_level, log_format)
        split |= (prefill, decode, cache_gb, disk_gb) != (None, None, None, None)
        with logged("supervisor" if split else "server", logs) as log, ended_by_sigterm(), _lifetime(models, config):
            if split:
                cache_gb = _CACHE_GB if cache_gb is None else cache_gb
                sizes = {"num_prefill": prefill or 1, "num_decode": decode or 1}
                disk = disk_of(disk_gb, disk_dir, _only(models), config) if disk_gb and cache_gb else None
                _serve_split(
                    _only(models), config, gateway, access_options, warm, logs, **sizes, cache_gb=cache_gb, disk=disk
                )
            elif len(models) == 1 and memory_gb is None:
                _serve(load, models[0], config, gateway, access_options, warm, log)
            else:
                budget = None if memory_gb is None else int(memory_gb * 2**30)
                _serve_several(load, models, config, gateway, access_options, warm, log, budget=budget)


@contextmanager
def _lifetime(models: list[str], config: EngineConfig) -> Iterator[None]:
    """The first line of a server's log and the last."""
    facts = {"version": __version__, "models": models, "device": config.device, "precision": config.precision}
    _LOG.info("start", extra=facts)
    began_s = time.monotonic()
    try:
        yield
    finally:
        _LOG.info("stopped", extra={"ran_s": round(time.monotonic() - began_s, 3)})


def _ready(url: str, banner: str, **facts: object) -> None:
    typer.echo(banner)
    _LOG.info("ready", extra={"url": url, **facts})


def _only(models: list[str]) -> str:
    if len(models) > 1:
        hint = (
            "start one server for each, or serve them in one process: without --split, --prefill, --decode, --cache-gb"
        )
        raise OneModelSplit(f"a split server serves one model, not {len(models)}", hint=hint)
    return models[0]


def _serve(
    load: Load,
    model: str,
    config: EngineConfig,
    gateway: GatewayConfig,
    access_options: _AccessOptions,
    warm: _Warm,
    log: Log,
) -> None:
    # Here, so that `tripool --help` does not import a web server.
    from tripool.engine.thread import EngineThread
    from tripool.gateway import create_app
    from tripool.gateway.admission import AdmissionBackend
    from tripool.gateway.server import Server, listen, url_of
    from tripool.router.admission_types import Capacity
    from tripool.text import Tokenizer

    cache = weight_cache(warm.gb, keep=warm.keep) if warm.asked_for else nullcontext()
    with listen(gateway.host, gateway.port) as listener, cache as weights:
        is_open = starts_open(listener, access_options.named, may_be_open=access_options.may_be_open)
        engine = load(model, config) if weights is None else load_model(model, config, weights)
        thread = EngineThread(engine)
        access = open_access(access_options.key_store, may_be_open=is_open)
        try:
            room = Capacity(slots=config.max_running)
            admission = AdmissionBackend(thread, room=lambda: room, tenant_of=access.tenant_named)
            application = create_app(admission, Tokenizer(engine.text), engine.name, gateway, access=access)
            server = Server(
                application,
                on_ready=lambda: _ready(url_of(listener), _banner_of(url_of(listener), engine), keys=access.keys),
                end_answers=lambda: thread.close(0),
            )
            log.serving()
            server.run([listener])
        finally:
            thread.close(_CLOSE_S)
            access.close()


def _serve_several(
    load: Load,
    models: list[str],
    config: EngineConfig,
    gateway: GatewayConfig,
    access_options: _AccessOptions,
    warm: _Warm,
    log: Log,
    *,
    budget: int | None,
) -> None:
    from tripool.cli.several import Loaded, serve_several
    from tripool.gateway.server import listen

    with listen(gateway.host, gateway.port) as listener, weight_cache(warm.gb, keep=warm.keep) as weights:
        is_open = starts_open(listener, access_options.named, may_be_open=access_options.may_be_open)

        def open_(model: str) -> Loaded:
            if load is not load_model:
                return Loaded(load(model, config), False)
            from tripool.engine.load import load_told

            return Loaded(*load_told(model, config, weight_cache=weights))

        access = open_access(access_options.key_store, may_be_open=is_open)
        try:
            serve_several(models, config, gateway, listener, log, budget=budget, access=access, open_=open_)
        finally:
            access.close()


def _serve_split(
    model: str,
    config: EngineConfig,
    gateway: GatewayConfig,
    access_options: _AccessOptions,
    warm: _Warm,
    logs: LogOptions,
    *,
    num_prefill: int,
    num_decode: int,
    cache_gb: float,
    disk: Disk | None,
) -> None:
    from tripool.cli.split import serve_split
    from tripool.control.run_manifest import RunManifest
    from tripool.gateway.server import listen, url_of

    def banner(manifest: RunManifest) -> str:
        workers = f"{num_prefill} prefill and {num_decode} decode workers, cache {cache_gb:g} GB"
        workers += f" and {disk.gb:g} GB of disk" if disk is not None else ""
        return _banner(url_of(listener), manifest.name, manifest.text, workers)

    with listen(gateway.host, gateway.port) as listener:
        is_open = starts_open(listener, access_options.named, may_be_open=access_options.may_be_open)
        serve_split(
            model,
            config,
            listener,
            keys=access_options.key_store,
            is_open=is_open,
            num_prefill=num_prefill,
            num_decode=num_decode,
            cache_gb=cache_gb,
            model_cache_gb=warm.gb,
            keep_models=warm.keep,
            disk=disk,
            logs=logs,
            on_ready=lambda plan: _ready(url_of(listener), banner(plan), prefill=num_prefill, decode=num_decode),
        )


def _banner_of(url: str, engine: StepEngine) -> str:
    sizes = f"weights {engine.weight_bytes / 1e6:,.0f} MB, KV {engine.kv_bytes / 1e6:,.0f} MB"
    return _banner(url, engine.name, engine.text, f"{sizes}, context {engine.context_tokens:,} tokens")


def _banner(url: str, name: str, text: TextFiles, details: str) -> str:
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if text.chat_template is None:
        path, body = "completions", '{"prompt": "Once upon a time"}'
    return (
        f"Tripool serves {name} at {url}/v1 ({details})\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\nCtrl-C stops it."
    )
