"""The model cache as `tripool serve` sets it up: where its images lie, how much they may take, how long they stay."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.fabric.folder import memory_folder

if TYPE_CHECKING:
    from tripool.cache.weight_cache import WeightCache

ModelCacheGb = Annotated[
    float | None,
    typer.Option("--model-cache-gb", min=0, help="Shared memory for packed weights; 0: none. Half of it by default."),
]
KeepModels = Annotated[
    bool, typer.Option("--keep-models", help="Leave packed weights in shared memory: the next start is warm.")
]

_FOLDER = "models"


def kept_weights_folder() -> Path:
    """One per user, outlives servers. Its name is not that of a run: those are swept."""
    return memory_folder() / f"tripool.models-{os.getuid()}"


def quota_bytes(gb: float | None) -> int:
    if gb is not None:
        return int(gb * 2**30)
    room = os.statvfs(memory_folder())
    return room.f_blocks * room.f_frsize // 2


def weight_cache_folder(run_folder: Path, *, keep: bool) -> Path:
    return kept_weights_folder() if keep else run_folder / _FOLDER


@contextmanager
def weight_cache(gb: float | None, *, keep: bool) -> Iterator[WeightCache | None]:
    """For a server of one process; None when there is to be no cache."""
    from tripool.cache.weight_cache import WeightCache
    from tripool.fabric.folder import RunFolder

    quota = quota_bytes(gb)
    if not quota:
        yield None
    elif keep:
        yield WeightCache(kept_weights_folder(), quota)
    else:
        run = RunFolder()
        try:
            yield WeightCache(weight_cache_folder(run.path, keep=False), quota)
        finally:
            run.remove()


def forget_kept_weights() -> bool:
    """Give back what earlier servers kept. False when there was nothing; what is mapped stays with who maps it."""
    folder = kept_weights_folder()
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False  # somebody else's: servers of this user keep nothing there
    shutil.rmtree(folder, ignore_errors=True)
    return True
