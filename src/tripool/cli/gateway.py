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
        keys: Annotated[Path, typer.Option(help="The key store.")],
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
            process = GatewayProcess(folder, WorkerId("gateway", epoch), channel, gateway_access(folder, keys))
            with socket.socket(fileno=http_fd) as listener:
                log.serving()
                process.run(listener)
            if channel.ended:  # without a supervisor, the gateway is the last process that knows the folder
                shutil.rmtree(folder, ignore_errors=True)
