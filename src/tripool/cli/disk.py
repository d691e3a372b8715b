"""The disk behind the cache pool as `tripool serve` sets it up: how much, where, and whose blocks it may hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import typer

import tripool
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.config import EngineConfig
from tripool.core import BLOCK_TOKENS
from tripool.errors import DiskError

DiskGb = Annotated[
    float | None, typer.Option("--disk-gb", min=0.001, help="Disk behind the cache pool; none by default.")
]
DiskDir = Annotated[
    Path | None, typer.Option("--disk-dir", help="Where; kept for the next start. The user's cache folder by default.")
]


_CODE = ("models", "kernels", "engine")
"""What decides the bits of a block. So nobody has to remember to raise a number."""


@dataclass(frozen=True, slots=True)
class Disk:
    gb: float
    folder: Path
    fingerprint: str


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return cache / "tripool" / "blocks"


def disk_of(gb: float, folder: Path | None, model: str, config: EngineConfig) -> Disk:
    """Raises, like anything that opens it, if there is no such model; and if others could replace the folder."""
    folder = (folder or default_folder()).absolute()
    try:
        make_private(folder)
    except NotPrivate as error:
        raise DiskError(error.message, hint=f"choose another --disk-dir: {error.hint}") from error
    except OSError:
        pass  # members say what is wrong with it, and memory goes on without
    return Disk(gb, folder, fingerprint(model, config))


def fingerprint(model: str, config: EngineConfig) -> str:
    """Equal only if blocks are: the same checkpoint, arithmetic and code. Others' blocks are not read, but replaced."""
    said = blake2b(digest_size=16, person=b"tripool-disk")
    for word in (str(BLOCK_TOKENS), config.precision, config.device, str(config.mtp), *_checkpoint(model)):
        said.update(len(word.encode()).to_bytes(8, "little") + word.encode())
    root = Path(tripool.__file__).parent
    for room in _CODE:
        for file in sorted((root / room).rglob("*.[pch]*")):
            if file.suffix in (".py", ".c", ".h"):
                said.update(file.read_bytes())
    return said.hexdigest()


def _checkpoint(model: str) -> Iterator[str]:
    if model.partition(":")[0] == "fake":
        yield model
        return
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        yield checkpoint.name
        path = checkpoint.path
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        found = file.stat()
        yield f"{file.name} {found.st_size} {found.st_mtime_ns}"


def disk_argv(disk: Disk, num_members: int) -> tuple[str, ...]:
    """For one member."""
    num_bytes = int(disk.gb * 2**30 / num_members)
    return (
        "--disk-bytes", str(num_bytes), "--disk-dir", str(disk.folder), "--disk-fingerprint", disk.fingerprint
    )  # fmt: skip
