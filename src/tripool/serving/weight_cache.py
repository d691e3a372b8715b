"""The weight cache of a server: the folder of its packed weights in shared memory, their quota, and when they go."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tripool.cache.weight_cache import WeightCache
from tripool.fabric.folder import RunFolder, memory_folder

_FOLDER = "models"


@dataclass(frozen=True, slots=True)
class WeightCacheConfig:
    gb: float | None = None
    """0: no weight cache. None: half of the shared memory."""
    keep: bool = False
    """Leave packed weights in shared memory for the next server."""

    @property
    def requested(self) -> bool:
        return self.keep or bool(self.gb)

    @property
    def quota_bytes(self) -> int:
        if self.gb is not None:
            return int(self.gb * 2**30)
        memory = os.statvfs(memory_folder())
        return memory.f_blocks * memory.f_frsize // 2

    def folder(self, run_folder: Path) -> Path:
        return kept_weights_folder() if self.keep else run_folder / _FOLDER

    @contextmanager
    def opened(self) -> Iterator[WeightCache | None]:
        """For a server of one process; None without a weight cache."""
        quota_bytes = self.quota_bytes
        if not quota_bytes:
            yield None
        elif self.keep:
            yield WeightCache(kept_weights_folder(), quota_bytes)
        else:
            run = RunFolder()
            try:
                yield WeightCache(self.folder(run.path), quota_bytes)
            finally:
                run.remove()


def kept_weights_folder() -> Path:
    """One per user, outlives servers. It is not named like a run folder: stale run folders are removed."""
    return memory_folder() / f"tripool.models-{os.getuid()}"


def forget_kept_weights() -> bool:
    """Free what earlier servers kept; False without any. Mapped weights stay with the process that maps them."""
    folder = kept_weights_folder()
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False  # another user's: servers of this user keep nothing there
    shutil.rmtree(folder, ignore_errors=True)
    return True
