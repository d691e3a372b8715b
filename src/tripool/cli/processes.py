"""Processes of a split server: `worker`, and the hidden `gateway` and `cache-member` that `serve --split` starts."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged
from tripool.cli.options import Model, engine_options
from tripool.config import EngineConfig, GatewayConfig
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.fabric.supervisor_channel import SupervisorChannel

_LOG, _LOGS = logging.getLogger("tripool.cache"), LogOptions()
_LOOK_S = 1.0
"""Longest wait of a standby before it looks whether its supervisor is still there."""


def register(app: typer.Typer) -> None:
    _register_worker(app)
    _register_standby(app)
    _register_gateway(app)
    _register_cache_member(app)


def _register_worker(app: typer.Typer) -> None:
    @app.command()
    @engine_options()
    def worker(
        model: Model = "tiny",
        role: Annotated[Literal["prefill", "decode"], typer.Option(help="Which pool it joins.")] = "decode",
        join: Annotated[str, typer.Option(help="Address of the server; `tripool status` shows it.")] = "",
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
        """Compute for a server that runs on this machine."""
        from tripool.cache.weight_cache import WeightCache
        from tripool.control.run_manifest import read_manifest
        from tripool.fabric.folder import folder_of
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import WorkerId
        from tripool.serving.ranks import ExpertProcess
        from tripool.serving.worker import WorkerProcess, load_pool_engine

        if not join.startswith("ipc://"):
            hint = "`tripool status` shows the address of a server on this machine; it begins with ipc://"
            raise InvalidRequest(f"cannot join '{join}'", hint=hint, param="join")
        channel = SupervisorChannel.inherited(supervisor_channel) if supervisor_channel is not None else None
        # A worker that joins by itself has no supervisor to count its epochs. Its name may come again with its process
        # number, but later by a clock that is never set back.
        worker_id = WorkerId(name or f"{role}-{os.getpid()}", epoch or time.monotonic_ns())
        with logged(worker_id.name, LogOptions(log_level, log_format)) as log:
            manifest = read_manifest(folder_of(join))
            weight_cache = (
                WeightCache(Path(manifest.model_cache), manifest.model_cache_bytes) if manifest.model_cache else None
            )
            engine = load_pool_engine(model, config, role, weight_cache)
            log.serving()
            process: WorkerProcess | ExpertProcess
            if experts_only:
                process = ExpertProcess(engine, worker_id, join, channel, instance=instance, rank=rank)
            else:
                process = WorkerProcess(engine, role, worker_id, join, channel, instance=instance, rank=rank)
            with process:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda *_: process.stop())
                process.run()


def _register_standby(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def standby(
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
    ) -> None:
        """Import what a rank needs, and become the rank that the supervisor names."""
        import tripool.engine.load
        import tripool.kernels.cpu8.exchange
        import tripool.serving.worker  # noqa: F401
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


def _register_gateway(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def gateway(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        http_fd: Annotated[int, typer.Option(help="The listening socket.")],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        keys: Annotated[Path, typer.Option(help="The key store.")],
        response_store_bytes: Annotated[int, typer.Option()] = 0,
        cors_origin: Annotated[list[str] | None, typer.Option()] = None,
        grpc_address: Annotated[str | None, typer.Option()] = None,
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve HTTP for workers in other processes."""
        import shutil
        import socket

        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.messages import WorkerId
        from tripool.serving.access import gateway_access
        from tripool.serving.gateway import GatewayProcess

        with logged("gateway", LogOptions(log_level, log_format)) as log:
            channel = SupervisorChannel.inherited(supervisor_channel)
            config = GatewayConfig(response_store_bytes=response_store_bytes, cors_origins=tuple(cors_origin or ()))
            access = gateway_access(folder, keys)
            process = GatewayProcess(
                folder, WorkerId("gateway", epoch), channel, access, config, grpc_address=grpc_address
            )
            with socket.socket(fileno=http_fd) as listener:
                log.serving()
                process.run(listener)
            if channel.ended:  # without a supervisor, the gateway is the last process that knows the folder
                shutil.rmtree(folder, ignore_errors=True)


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
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Cache blocks for the prefill and decode workers of this machine."""
        from tripool.cache.member import run_member
        from tripool.config import CacheConfig, DiskConfig
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
        with logged(name, LogOptions(log_level, log_format)) as log:
            log.serving()
            _LOG.info("start", extra={"epoch": epoch, "slots": num_slots, "slot_bytes": slot_bytes})
            run_member(folder, worker_id, CacheConfig(slot_bytes=slot_bytes, num_slots=num_slots, disk=disk))
            _LOG.info("stopped")
        tied.close()  # not before: the supervisor takes a closed channel for a dead process


def _end_with(supervisor_channel: SupervisorChannel) -> None:
    """Ask this process to end when its supervisor is gone."""
    while not supervisor_channel.ended:
        select.select([supervisor_channel], [], [])
        for _ in supervisor_channel.receive():
            pass
    os.kill(os.getpid(), signal.SIGTERM)
