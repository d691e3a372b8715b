"""`tripool cache-member`: a process of the cache pool. Started by `tripool serve --split`, not by users."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.cli.logs import LogFormat, LogLevel, LogOptions, logged

if TYPE_CHECKING:
    from tripool.fabric.supervisor_channel import SupervisorChannel

_LOG, _LOGS = logging.getLogger("tripool.cache"), LogOptions()


def register(app: typer.Typer) -> None:
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
