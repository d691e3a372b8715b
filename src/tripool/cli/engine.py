"""`tripool engine`, hidden: the process of a server's engine. What to load is the first message of its channel."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged
from tripool.cli.options import Load
from tripool.cli.terminal import load_model

if TYPE_CHECKING:
    from tripool.engine.wire import OpenEngine
    from tripool.engine_protocol import StepEngine

_LOG, _LOGS = logging.getLogger("tripool.engine"), LogOptions()


def register(app: typer.Typer, load: Load) -> None:
    @app.command(hidden=True)
    def engine(
        channel: Annotated[int, typer.Option(help="File descriptor of the connection to the server.")],
        log_level: LogLevel = _LOGS.level,
        log_format: LogFormat = _LOGS.style,
    ) -> None:
        """Compute for the server that has started this process."""
        from tripool.engine.process import run_engine
        from tripool.local_channel import StreamChannel

        with logged("engine", LogOptions(log_level, log_format)) as log:

            def loaded(opened: OpenEngine, progress: Callable[[str], None]) -> StepEngine:
                engine = _load(opened, progress) if load is load_model else load(opened.model, opened.config)
                log.serving()
                return engine

            run_engine(StreamChannel(socket.socket(fileno=channel)), loaded)
            _LOG.info("stopped")


def _load(opened: OpenEngine, progress: Callable[[str], None]) -> StepEngine:
    from tripool.cache.weight_cache import WeightCache
    from tripool.engine.load import load_engine

    weight_cache = None
    if opened.weight_folder:
        weight_cache = WeightCache(Path(opened.weight_folder), opened.weight_quota_bytes)
    return load_engine(
        opened.model,
        opened.config,
        progress=progress,
        weight_cache=weight_cache,
        shares_device=opened.shares_device,
    )
