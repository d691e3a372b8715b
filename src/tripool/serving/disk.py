"""The disk tier of a server's cache pool: its size, its folder, and the fingerprint of the model it holds blocks of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import tripool
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.config import EngineConfig
from tripool.core import BLOCK_TOKENS
from tripool.errors import DiskError

_CODE = ("models", "kernels", "engine")
"""The code that decides the bits of a block: a change of it changes the fingerprint, without a version to raise."""


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
    """Raises CheckpointMissing without such a model, and DiskError if other users could replace the folder."""
    folder = (folder or default_folder()).absolute()
    try:
        make_private(folder)
    except NotPrivate as error:
        raise DiskError(error.message, hint=f"choose another --disk-dir: {error.hint}") from error
    except OSError:
        pass  # members report what is wrong with it, and go on with memory alone
    return Disk(gb, folder, fingerprint(model, config))


def fingerprint(model: str, config: EngineConfig) -> str:
    """Equal only if blocks are: same checkpoint, arithmetic and code. Blocks of another fingerprint are replaced."""
    said = blake2b(digest_size=16, person=b"tripool-disk")
    arithmetic = config.precision, config.device, str(config.mtp), str(config.exact)
    for word in (str(BLOCK_TOKENS), *arithmetic, *_checkpoint(model)):
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


def disk_argv(disk: Disk | None, num_members: int) -> tuple[str, ...]:
    """For one of all members of a server."""
    if disk is None:
        return ()
    num_bytes = int(disk.gb * 2**30 / num_members)
    return (
        "--disk-bytes", str(num_bytes), "--disk-dir", str(disk.folder), "--disk-fingerprint", disk.fingerprint
    )  # fmt: skip
