"""`tripool gateway`: the gateway's process of a split server. Started by `tripool serve --split`, not by people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged

_LOGS = LogOptions()


def register(app: typer.Typer) -> None:
    @app.command(hidden=True)
    def gateway(
        folder: Annotated[Path, typer.Option(help="The folder of the run.")],
        http_fd: Annotated[int, typer.Option(help="The listening socket.")],
        epoch: Annotated[int, typer.Option()],
        supervisor_channel: Annotated[int, typer.Option()],
        keys: Annotated[Path, typer.Option(help="The key book.")],
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Serve HTTP for workers in other processes."""
        import shutil
        import socket

        from tripool.cache.client import PoolClient
        from tripool.cache.host import LocalHost
        from tripool.cli.access import gateway_access
        from tripool.config import GatewayConfig, RouterConfig
        from tripool.control.run_manifest import read_manifest
        from tripool.fabric.folder import gateway_address
        from tripool.fabric.supervisor_channel import SupervisorChannel
        from tripool.gateway.process import GatewayProcess
        from tripool.messages import WorkerId

        with logged("gateway", LogOptions(log_level, log_format)) as log:
            manifest = read_manifest(folder)
            tied = SupervisorChannel.inherited(supervisor_channel)
            process = GatewayProcess(
                manifest.text,
                manifest.name,
                GatewayConfig(),
                router=RouterConfig(),
                addresses=[gateway_address(folder)],
                worker_id=WorkerId("gateway", epoch),
                cache=PoolClient(LocalHost(folder), manifest.cache, WorkerId("gateway", epoch)),
                cache_client=PoolClient(LocalHost(folder), manifest.cache, WorkerId("quotas", epoch)),
                access=gateway_access(folder, keys),
                supervisor_channel=tied,
            )
            with socket.socket(fileno=http_fd) as listener:
                log.serving()
                process.run(listener)
            if tied.ended:  # nobody else is left to do it
                shutil.rmtree(folder, ignore_errors=True)
