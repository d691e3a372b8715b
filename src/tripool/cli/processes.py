"""Processes of a split server: `worker`, and the hidden ones that `serve --split` starts."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged, on_signals
from tripool.cli.options import DiskDir, DiskGb, MooncakeStore, Token, TrustedNetwork, engine_options
from tripool.config import EngineConfig, GatewayConfig
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.fabric.supervisor_channel import SupervisorChannel
    from tripool.messages import AnyMessage

_LOG, _LOGS, _GATEWAY = logging.getLogger("tripool.cache"), LogOptions(), GatewayConfig()
_LOOK_S = 1.0
"""Longest wait of a standby before it looks whether its supervisor is still there."""
_IMPORT_NICE = 5


def register(app: typer.Typer) -> None:
    _register_worker(app)
    _register_standby(app)
    _register_gateway(app)
    _register_coordinator(app)
    _register_cache_member(app)
    _register_host_server(app)


def _register_worker(app: typer.Typer) -> None:
    @app.command()
    @engine_options()
    def worker(
        model: Annotated[str, typer.Argument(help="Of the server; a path: a local copy. The first, if none.")] = "",
        role: Annotated[
            Literal["prefill", "decode", "any", "gateway"],
            typer.Option(help="Which pool it joins; any: the one that needs it; gateway: it serves HTTP."),
        ] = "decode",
        join: Annotated[
            str, typer.Option(help="Address of the server: as it prints with --listen, or as `tripool status` shows.")
        ] = "",
        token: Token = "",
        listen: Annotated[
            str, typer.Option(metavar="ADDRESS:PORT", help="Where the server reaches this machine, if it must.")
        ] = "",
        trusted_network: TrustedNetwork = False,
        cache_gb: Annotated[float, typer.Option(min=0, help="Memory for cached blocks of the whole server.")] = 0.0,
        disk_gb: DiskGb = None,
        disk_dir: DiskDir = None,
        mooncake_store: MooncakeStore = "",
        reserve: Annotated[str, typer.Option(metavar="TENANT", help="Serve this tenant's requests only.")] = "",
        host: Annotated[str, typer.Option(help="Of a gateway: address to serve HTTP at.")] = _GATEWAY.host,
        port: Annotated[int, typer.Option(min=0, max=65535, help="Of a gateway.")] = _GATEWAY.port,
        name: Annotated[str | None, typer.Option(hidden=True)] = None,
        instance: Annotated[str, typer.Option(hidden=True)] = "",
        rank: Annotated[int, typer.Option(hidden=True)] = 0,
        experts_only: Annotated[bool, typer.Option("--experts-only", hidden=True)] = False,
        epoch: Annotated[int | None, typer.Option(hidden=True)] = None,
        supervisor_channel: Annotated[int | None, typer.Option(hidden=True)] = None,
        *,
        config: EngineConfig,
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Compute for a server on this machine or, with its token, on another one."""
        logs = LogOptions(log_level, log_format)
        if role == "gateway":
            gateway = GatewayConfig(host=host, port=port)
            _join_gateway(logs, join=join, token=token, trusted=trusted_network, gateway=gateway)
            return
        if not join.startswith("ipc://"):
            cache = {"gb": cache_gb, "disk_gb": disk_gb, "disk_dir": disk_dir, "mooncake_store": mooncake_store}
            _join_host(
                logs, join=join, token=token, model=model, role=role, listen=listen, trusted=trusted_network,
                threads=config.threads, kv_gb=config.kv_gb, reserve=reserve, cache=cache,
            )  # fmt: skip
            return
        from tripool.cache.weight_cache import WeightCache
        from tripool.control.run_manifest import read_manifest
        from tripool.fabric.folder import folder_of
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import WorkerId
        from tripool.serving.ranks import ExpertProcess
        from tripool.serving.worker import WorkerProcess, load_pool_engine

        model = model or "tiny"
        if role == "any":
            raise InvalidRequest("on the server's own machine a worker has a role", hint="name one", param="role")
        channel = SupervisorChannel.inherited(supervisor_channel) if supervisor_channel is not None else None
        # A worker that joins by itself has no supervisor to count its epochs. Its name may come again with its process
        # number, but later by a clock that is never set back.
        worker_id = WorkerId(name or f"{role}-{os.getpid()}", epoch or time.monotonic_ns())
        with logged(worker_id.name, logs) as log:
            manifest = read_manifest(folder_of(join))
            folder = manifest.model_cache
            weight_cache = WeightCache(Path(folder), manifest.model_cache_bytes) if folder else None
            engine = load_pool_engine(model, config, role, weight_cache)
            log.serving()
            process: WorkerProcess | ExpertProcess
            if experts_only:
                process = ExpertProcess(engine, worker_id, join, channel, instance=instance, rank=rank)
            else:
                process = WorkerProcess(
                    engine, role, worker_id, join, channel, instance=instance, rank=rank, reserved_for=reserve
                )
            with process:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda *_: process.stop())
                process.run()


def _join_host(logs: LogOptions, *, join: str, cache: dict[str, Any], **options: Any) -> None:
    from tripool.serving.hosts import HostConfig, build_host
    from tripool.serving.joined_cache import MemberConfig

    if not join.startswith("tcp://"):
        hint = "tcp://HOST:PORT, as `tripool serve --listen` prints it, or ipc://... as `tripool status` shows it"
        raise InvalidRequest(f"step 'address': cannot join '{join}'", hint=hint, param="join")
    if not cache["gb"] and (cache["disk_gb"] or cache["mooncake_store"]):
        raise InvalidRequest("a disk or a store is behind memory", hint="add --cache-gb 1", param="cache_gb")
    config = HostConfig(join=join, cache=MemberConfig(**cache), **options)
    with logged("host", logs) as log:
        host = build_host(config, lambda step, what: typer.echo(f"{step}: {what}"), child_options=logs.argv())
        log.serving()
        with on_signals(lambda _: host.stop(), signal.SIGINT, signal.SIGTERM):
            host.run(lambda: typer.echo(f"ready: {host.worker} serves {join}. Ctrl-C stops it."))


def _join_gateway(logs: LogOptions, *, join: str, **options: Any) -> None:
    from tripool.serving.joined_gateway import JoinedGatewayConfig, build_joined_gateway

    if not join.startswith("tcp://"):
        hint = "tcp://HOST:PORT, as `tripool serve --listen` prints it; on the server's own machine: serve --gateways N"
        raise InvalidRequest(f"step 'address': cannot join '{join}'", hint=hint, param="join")
    config = JoinedGatewayConfig(join=join, **options)
    with logged("host", logs) as log:
        gateway = build_joined_gateway(
            config, lambda step, what: typer.echo(f"{step}: {what}"), child_options=logs.argv()
        )
        log.serving()
        with on_signals(lambda _: gateway.stop(), signal.SIGINT, signal.SIGTERM):
            gateway.run(lambda: typer.echo(f"ready: {gateway.url}/v1 serves {join}. Ctrl-C stops it."))


def _register_standby(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def standby(
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
    ) -> None:
        """Import what a rank needs, and become the rank that the supervisor names."""
        importing = threading.Thread(target=_import_slowly)
        importing.start()
        importing.join()
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import Assign, Ready, WorkerId

        channel = SupervisorChannel.inherited(supervisor_channel)
        channel.send(Ready(WorkerId("standby", epoch)))
        while not channel.ended:
            select.select([channel], [], [], _LOOK_S)
            for message in channel.receive():
                if isinstance(message, Assign):
                    # `channel` stays referenced: the rank goes on with its file descriptor.
                    app([*message.argv, "--epoch", str(message.epoch), "--supervisor-channel", str(supervisor_channel)])


def _import_slowly() -> None:
    """After the ranks that serve: no request waits for a standby. On Linux a priority is a thread's own, and one that
    was lowered cannot be raised again; so this thread only imports."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IMPORT_NICE)
    import tripool.engine.load
    import tripool.kernels.cpu8.exchange
    import tripool.serving.worker  # noqa: F401


def _register_gateway(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def gateway(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        http_fd: Annotated[int, typer.Option(help="The listening socket.")],
        name: Annotated[str, typer.Option()],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        keys: Annotated[Path | None, typer.Option(help="The key store; none: it is the server's.")] = None,
        response_store_bytes: Annotated[int | None, typer.Option()] = None,
        batch_dir: Annotated[str, typer.Option()] = "",
        batch_lock: Annotated[int | None, typer.Option()] = None,
        cors_origin: Annotated[list[str] | None, typer.Option()] = None,
        grpc_address: Annotated[str | None, typer.Option()] = None,
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve HTTP for workers in other processes."""
        import socket

        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import WorkerId
        from tripool.serving.access import gateway_access
        from tripool.serving.gateway import GatewayProcess

        with logged(name, LogOptions(log_level, log_format)) as log:
            channel = SupervisorChannel.inherited(supervisor_channel)
            config = GatewayConfig(
                response_store_bytes=response_store_bytes, cors_origins=tuple(cors_origin or ()), batch_dir=batch_dir
            )
            access = None if keys is None else gateway_access(folder, keys)
            process = GatewayProcess(
                folder, WorkerId(name, epoch), channel, access, config, grpc_address=grpc_address,
                batch_lock=batch_lock,
            )  # fmt: skip
            with socket.socket(fileno=http_fd) as listener:
                log.serving()
                process.run(listener)


def _register_coordinator(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def coordinator(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        name: Annotated[str, typer.Option()],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Admit and place the requests of the gateways of a run."""
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import WorkerId
        from tripool.serving.coordinator import CoordinatorProcess

        with logged(name, LogOptions(log_level, log_format)) as log:
            channel = SupervisorChannel.inherited(supervisor_channel)
            process = CoordinatorProcess(folder, WorkerId(name, epoch), channel)
            log.serving()
            process.run()


def _register_cache_member(app: typer.Typer) -> None:
    @app.command(hidden=True, name="cache-member")
    def cache_member(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        name: Annotated[str, typer.Option()],
        slot_bytes: Annotated[int, typer.Option()],
        num_slots: Annotated[int, typer.Option()],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        disk_bytes: Annotated[int, typer.Option()] = 0,
        disk_dir: Annotated[Path | None, typer.Option()] = None,
        disk_fingerprint: Annotated[str, typer.Option()] = "",
        store_master: Annotated[str, typer.Option()] = "",
        store_address: Annotated[str, typer.Option()] = "",
        store_fingerprint: Annotated[str, typer.Option()] = "",
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Cache blocks for the prefill and decode workers of this machine."""
        from tripool.cache.member import run_member
        from tripool.config import CacheConfig, DiskConfig, StoreConfig
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import Ready, WorkerId

        worker_id = WorkerId(name, epoch)
        tied = SupervisorChannel.inherited(supervisor_channel)
        tied.send(Ready(worker_id))
        # The parent's pid is no evidence if it died before the first check; the channel reports that too.
        threading.Thread(target=_end_with, args=(tied,), daemon=True).start()
        disk = None
        if disk_bytes:
            disk = DiskConfig(folder=str(disk_dir), num_bytes=disk_bytes, fingerprint=disk_fingerprint)
        store = None
        if store_master:
            store = StoreConfig(master=store_master, own_address=store_address, fingerprint=store_fingerprint)
        with logged(name, LogOptions(log_level, log_format)) as log:
            log.serving()
            _LOG.info("start", extra={"epoch": epoch, "slots": num_slots, "slot_bytes": slot_bytes})
            config = CacheConfig(slot_bytes=slot_bytes, num_slots=num_slots, disk=disk, store=store)
            run_member(folder, worker_id, config)
            _LOG.info("stopped")
        tied.close()  # not before: the supervisor takes a closed channel for a dead process


def _register_host_server(app: typer.Typer) -> None:
    @app.command(hidden=True, name="host-server")
    def host_server(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        listen_fd: Annotated[int, typer.Option(help="The listening socket.")],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve the other machines of a run."""
        import socket

        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.hosts.directory import read_own
        from tripool.hosts.experts import ExpertLinks
        from tripool.hosts.leader import Leader
        from tripool.hosts.server import HostServer
        from tripool.messages import Ready, SilentRank, WorkerId

        worker_id, own = WorkerId("host-server", epoch), read_own(folder)
        assert own is not None
        tied = SupervisorChannel.inherited(supervisor_channel)
        experts = ExpertLinks(folder, own, tied.send) if own.ranks else None

        def receive(message: AnyMessage) -> None:
            if experts is not None and isinstance(message, SilentRank):
                experts.silent(message)

        threading.Thread(target=_end_with, args=(tied, receive), daemon=True).start()
        with logged(worker_id.name, LogOptions(log_level, log_format)) as log, socket.socket(fileno=listen_fd) as end:
            server = HostServer(folder, end, worker_id, own, None if own.join else Leader(folder), experts)
            stopped = threading.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stopped.set())
            log.serving()
            tied.send(Ready(worker_id))
            server.run(lambda: not stopped.is_set())


def _end_with(supervisor_channel: SupervisorChannel, receive: Callable[[AnyMessage], None] = lambda _: None) -> None:
    """Ask this process to end when its supervisor is gone."""
    while not supervisor_channel.ended:
        select.select([supervisor_channel], [], [])
        for message in supervisor_channel.receive():
            receive(message)
    os.kill(os.getpid(), signal.SIGTERM)
