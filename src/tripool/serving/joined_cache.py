"""The cache member of a host that joins: its name, its memory, and what is behind that: a disk, a Mooncake Store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tripool.config import EngineConfig
from tripool.control.launch import Spec
from tripool.fabric.folder import RunFolder
from tripool.hosts.wire import Joined
from tripool.serving.disk import (
    default_folder,
    disk_argv,
    disk_of,
    lasting_name,
    mark_of,
    member_spec,
    reach_store,
    store_argv,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """One member: a host dies as a whole, mostly."""

    gb: float = 0.0
    """Of memory; 0: there is no member."""
    disk_gb: float | None = None
    disk_dir: Path | None = None
    mooncake_store: str = ""
    """HOST:PORT of a Mooncake Store's master; empty: none."""


class JoinedCache:
    """`names`: of the member; none if there is none."""

    def __init__(self, config: MemberConfig, joined: Joined, host: str, stack: ExitStack) -> None:
        """Raises DiskError or StoreMissing if it cannot be had here."""
        self._config = config
        self._argv: tuple[str, ...] = ()
        self._fds: tuple[int, ...] = ()
        self.names: tuple[str, ...] = (f"cache-{host}-0",) if config.gb else ()
        # As the server's own members count: one store may be behind both.
        checkpoint = (joined.model, joined.identity) if joined.files else (joined.path,)
        mark = mark_of(_arithmetic(joined.options), checkpoint)
        if config.disk_gb:
            model = Path(joined.model).name.strip(".") or "model"
            disk = disk_of(config.disk_gb, (config.disk_dir or default_folder()) / model, mark)
            with suppress(OSError):  # the member says what is wrong with the folder, and goes on with memory alone
                name, lock = lasting_name(disk.folder)
                stack.callback(os.close, lock)
                self.names, self._fds = (name,), (lock,)
            self._argv += disk_argv(disk, 1)
        if config.mooncake_store:
            self._argv += store_argv(config.mooncake_store, reach_store(config.mooncake_store), mark)

    def spec(self, name: str, block_bytes: int, folder: RunFolder, options: tuple[str, ...]) -> Spec:
        return member_spec(name, block_bytes, self._config.gb, folder, (*self._argv, *options), self._fds)


def _arithmetic(options: Sequence[str]) -> EngineConfig:
    """What `engine_argv` says of how numbers are computed."""
    options_given = dict(pairwise(options))
    return EngineConfig(
        precision=options_given.get("--precision", ""),  # type: ignore[arg-type]
        device=options_given.get("--device", ""),  # type: ignore[arg-type]
        mtp="--mtp" in options,
        exact="--exact" in options,
    )
