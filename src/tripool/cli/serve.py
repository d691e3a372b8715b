"""`tripool serve`: options, banner and log of a server of one process or of several."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tripool import __version__
from tripool.cli.keys import KeysFile
from tripool.cli.logs import LogFormat, LogLevel, LogOptions, leave, logged, on_signals
from tripool.cli.options import DiskDir, DiskGb, Load, ModelNames, MooncakeStore, Token, TrustedNetwork, engine_options
from tripool.cli.terminal import load_model, stderr
from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    # Here, so that `tripool --help` does not import a web server.
    from tripool.engine.wire import EngineReady
    from tripool.serving import ColocatedServer, SplitServer
    from tripool.serving.server import BuiltServer
    from tripool.serving.split import SplitConfig
    from tripool.text.files import TextFiles

_LOG = logging.getLogger("tripool.serve")
_CACHE_GB = 0.25
_GATEWAY, _LOGS = GatewayConfig(), LogOptions()

Open = Annotated[
    bool,
    typer.Option("--open", help="Serve other machines although there are no API keys; where there are, they count."),
]
ModelCacheGb = Annotated[
    float | None,
    typer.Option(min=0, help="Shared memory for packed weights; 0: none. Half of it by default."),
]
KeepModels = Annotated[
    bool, typer.Option("--keep-models", help="Leave packed weights in shared memory: the next start is warm.")
]


def _pool(role: str) -> Any:
    about = f"{role} instances; 1x4: one of four ranks, experts spread over them; 1x4+2: two more hold the experts."
    return typer.Option(parser=PoolSize.parse, metavar="N[xRANKS[+EXPERTS]]", help=about)


Listen = Annotated[
    str,
    typer.Option(metavar="ADDRESS:PORT", help="Where workers of other machines may join; implies --split."),
]
TransferBy = Annotated[
    Literal["tcp", "mooncake"],
    typer.Option("--transfer", help="How KV gets to other machines; mooncake needs its package and --trusted-network."),
]
SecondCopy = Annotated[
    bool, typer.Option("--second-copy", help="Keep cached blocks that are read often on two machines.")
]
Hosts = Annotated[
    int, typer.Option(min=1, max=64, help="Machines, this one included, over which ranks of an instance are spread.")
]
Gateways = Annotated[
    int | None, typer.Option(min=1, max=64, help="Processes that serve HTTP, on one port; implies --split.")
]
ResponseStoreMb = Annotated[
    float | None,
    typer.Option(
        min=0, help="Memory for responses that clients refer to by id; by default answers alone, for an hour."
    ),
]
BatchDir = Annotated[
    Path | None, typer.Option(help="Of clients' files and batches; by port in the user's state folder when not given.")
]
CorsOrigin = Annotated[
    list[str] | None, typer.Option(help="Origin of web pages that may use this server from a browser; repeatable.")
]
GrpcPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of gRPC, at the same address; 0 picks a free one.")
]
CacheGb = Annotated[float | None, typer.Option(min=0, help="Of the cache pool; 0.25 when split; implies --split.")]
MemoryGb = Annotated[float | None, typer.Option(min=0.001, help="For several models together, weights and KV.")]


def register(app: typer.Typer, load: Load, program: Sequence[str]) -> None:
    @app.command()
    @engine_options()
    def serve(
        models: ModelNames = None,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = _GATEWAY.host,
        port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = _GATEWAY.port,
        *,
        config: EngineConfig,
        split: Annotated[bool, typer.Option("--split", help="Prefill and decode in processes of their own.")] = False,
        prefill: Annotated[PoolSize | None, _pool("Prefill")] = None,
        decode: Annotated[PoolSize | None, _pool("Decode")] = None,
        cache_gb: CacheGb = None,
        listen: Listen = "",
        hosts: Hosts = 1,
        gateways: Gateways = None,
        token: Token = "",
        trusted_network: TrustedNetwork = False,
        transfer: TransferBy = "tcp",
        second_copy: SecondCopy = False,
        disk_gb: DiskGb = None,
        disk_dir: DiskDir = None,
        mooncake_store: MooncakeStore = "",
        memory_gb: MemoryGb = None,
        model_cache_gb: ModelCacheGb = None,
        keep_models: KeepModels = False,
        keys: KeysFile = None,
        open: Open = False,
        response_store_mb: ResponseStoreMb = None,
        batch_dir: BatchDir = None,
        cors_origin: CorsOrigin = None,
        grpc_port: GrpcPort = None,
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve MODELS over HTTP, in one process or split."""
        from tripool.serving import AccessConfig, WeightCacheConfig, build_colocated, build_split
        from tripool.serving.hosts import ListenConfig
        from tripool.serving.split import SplitConfig

        models = models or ["tiny"]
        gateway = _gateway_config(host, port, response_store_mb, batch_dir, cors_origin or [], grpc_port)
        access, weights = AccessConfig(keys, open), WeightCacheConfig(model_cache_gb, keep_models)
        logs = LogOptions(log_level, log_format)
        split |= (prefill, decode, cache_gb, disk_gb) != (None, None, None, None)
        split |= bool(listen or mooncake_store or gateways) or hosts > 1
        if split and memory_gb is not None and len(models) > 1:
            hint = "leave out --memory-gb: workers of all models stay in memory"
            raise InvalidRequest("a split server loads and unloads no models", hint=hint, param="memory_gb")
        ending = on_signals(leave, signal.SIGTERM)
        with logged("supervisor" if split else "server", logs) as log, ending, _lifetime(models, config):
            if split:
                cache_gb = _CACHE_GB if cache_gb is None else cache_gb
                pools = SplitConfig(
                    prefill=prefill or PoolSize(), decode=decode or PoolSize(), cache_gb=cache_gb, disk_gb=disk_gb,
                    disk_dir=disk_dir, mooncake_store=mooncake_store, hosts=hosts, gateways=gateways or 1,
                )  # fmt: skip
                listening = ListenConfig(listen, token, trusted_network, transfer, second_copy) if listen else None
                with build_split(
                    models, config, gateway, pools=pools, access=access, weights=weights, hosts=listening,
                    child_options=logs.argv(),
                ) as split_server:  # fmt: skip
                    _run_split(split_server, pools)
                return
            own_process = config.device == "cuda"
            with _loading(load_model if own_process else load, models[0]) as (loader, progress):
                server = build_colocated(
                    models,
                    config,
                    gateway,
                    access=access,
                    weights=weights,
                    memory_gb=memory_gb,
                    load=loader,
                    engine_command=(*program, "engine", *logs.argv()) if own_process else None,
                    progress=progress,
                )
            with server:
                log.serving()
                server.run(lambda: _colocated_ready(server))


@contextmanager
def _loading(load: Load, model: str) -> Iterator[tuple[Load | None, Callable[[str], None] | None]]:
    """What `build_colocated` takes: `load` if it replaces the loading of checkpoints, else a progress display."""
    if load is not load_model:
        yield load, None
        return
    with stderr().status(f"loading {model}") as status:
        yield None, status.update


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


def _ready(server: BuiltServer, banner: str, **facts: object) -> None:
    typer.echo(banner)
    if server.grpc_address is not None:
        typer.echo(f"gRPC: {server.grpc_address}")
        facts["grpc"] = server.grpc_address
    _LOG.info("ready", extra={"url": server.url, **facts})


def _colocated_ready(server: ColocatedServer) -> None:
    assert server.access is not None
    banner = _models_banner(server) if server.engine is None else _engine_banner(server.url, server.engine)
    _ready(server, banner, keys=server.access.keys)


def _gateway_config(
    host: str, port: int, store_mb: float | None, batch_dir: Path | None, origins: list[str], grpc_port: int | None
) -> GatewayConfig:
    from tripool.gateway.cors import checked_origins
    from tripool.tenants.key_store import default_path

    if batch_dir is None and port:  # a server on a port of its own choice is not found again
        batch_dir = default_path().parent / "batches" / f"port-{port}"
    return GatewayConfig(
        host=host,
        port=port,
        response_store_bytes=None if store_mb is None else int(store_mb * 2**20),
        batch_dir="" if batch_dir is None else str(batch_dir.absolute()),
        cors_origins=checked_origins(origins),
        grpc_port=grpc_port,
    )


def _run_split(server: SplitServer, pools: SplitConfig) -> None:
    def ready() -> None:
        models = server.manifest.models
        each = " for each model" if len(models) > 1 else ""
        sizes = f"{pools.prefill} prefill and {pools.decode} decode workers{each}, cache {pools.cache_gb:g} GB"
        sizes += f" and {pools.disk_gb:g} GB of disk" if pools.disk_gb and pools.cache_gb else ""
        more = f"On another machine:\n  {server.join_line}\n\n" if server.join_line else ""
        banner = _banner(server.url, ", ".join(one.name for one in models), models[0].text, sizes, more)
        _ready(server, banner, prefill=pools.prefill.num_workers, decode=pools.decode.num_workers)

    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        server.stop()

    with on_signals(stop, signal.SIGINT, signal.SIGTERM):
        server.run(ready)
    if signal.SIGINT in received:
        raise KeyboardInterrupt


def _engine_banner(url: str, engine: EngineReady) -> str:
    sizes = f"weights {engine.weight_bytes / 1e6:,.0f} MB, KV {engine.kv_bytes / 1e6:,.0f} MB"
    return _banner(url, engine.name, engine.text, f"{sizes}, context {engine.context_tokens:,} tokens")


def _banner(url: str, name: str, text: TextFiles, details: str, more: str = "") -> str:
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if text.chat_template is None:
        path, body = "completions", '{"prompt": "Once upon a time"}'
    return (
        f"Tripool serves {name} at {url}/v1 ({details})\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n{more}Ctrl-C stops it."
    )


def _models_banner(server: ColocatedServer) -> str:
    names = [one.name for one in server.models]
    lines = [f"Tripool serves {len(names)} model{'s' if len(names) > 1 else ''} at {server.url}/v1", ""]
    for name in names:
        facts = server.models.control.describe(name)
        default = ", default" if name == names[0] else ""
        lines.append(f"  {name}: {facts['state']}{default}, {facts['bytes'] / 1e6:,.0f} MB")
    body = f'{{"model": "{names[0].partition("@")[0]}", "prompt": "Once upon a time"}}'
    curl = f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"
    return "\n".join([*lines, "", curl, "", "Ctrl-C stops it."])
