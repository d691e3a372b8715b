"""`tripool worker`: one more prefill or decode worker for a server that runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged
from tripool.cli.options import Model, engine_options
from tripool.config import EngineConfig
from tripool.errors import InvalidRequest

_LOGS = LogOptions()


def register(app: typer.Typer) -> None:
    @app.command()
    @engine_options()
    def worker(
        model: Model = "tiny",
        role: Annotated[Literal["prefill", "decode"], typer.Option(help="Which pool it joins.")] = "decode",
        join: Annotated[str, typer.Option(help="Address of the server; `tripool status` shows it.")] = "",
        name: Annotated[str | None, typer.Option(hidden=True)] = None,
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
            engine = load_pool_engine(model, config, weight_cache)
            log.serving()
            with WorkerProcess(engine, role, worker_id, join, channel) as process:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda *_: process.stop())
                process.run()
