"""The disk tier of a server's cache pool: its size, its folder, and the fingerprint of the model it holds blocks of."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import tripool
from tripool.cache.mooncake_store import store_class
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.config import EngineConfig
from tripool.core import BLOCK_TOKENS
from tripool.errors import DiskError, StoreMissing
from tripool.hosts.connection import parse_address
from tripool.hosts.join import address_towards
from tripool.hosts.models import files_of, identity_of

_CONNECT_S = 3.0
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


def fingerprint(model: str, config: EngineConfig, *, by_content: bool = False) -> str:
    """Equal only if blocks are: same checkpoint, arithmetic and code. Blocks of another fingerprint are replaced.
    `by_content`: of the checkpoint's files, equal on every machine; otherwise by their sizes and times, at once."""
    said = blake2b(digest_size=16, person=b"tripool-disk")
    arithmetic = config.precision, config.device, str(config.mtp), str(config.exact)
    for word in (str(BLOCK_TOKENS), *arithmetic, *_checkpoint(model, by_content)):
        said.update(len(word.encode()).to_bytes(8, "little") + word.encode())
    root = Path(tripool.__file__).parent
    for room in _CODE:
        for file in sorted((root / room).rglob("*.[pch]*")):
            if file.suffix in (".py", ".c", ".h"):
                said.update(file.read_bytes())
    return said.hexdigest()


def _checkpoint(model: str, by_content: bool) -> Iterator[str]:
    if model.partition(":")[0] == "fake":
        yield model
        return
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        yield checkpoint.name
        path = checkpoint.path
    if by_content:
        yield identity_of(files_of(path))
        return
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        found = file.stat()
        yield f"{file.name} {found.st_size} {found.st_mtime_ns}"


def store_argv(master: str, model: str, config: EngineConfig) -> tuple[str, ...]:
    """For a member whose blocks are also in a Mooncake Store. Raises what makes that impossible, with the remedy."""
    if not master:
        return ()
    host, port = parse_address(master)
    own = address_towards(master)
    store_class()
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        hint = "is `mooncake_master` running there, and is that its --rpc_port?"
        raise StoreMissing(f"no Mooncake Store's master at {master}: {error}", hint=hint) from error
    mark = fingerprint(model, config, by_content=True)
    return ("--store-master", master, "--store-address", own, "--store-fingerprint", mark)


def disk_argv(disk: Disk | None, num_members: int) -> tuple[str, ...]:
    """For one of all members of a server."""
    if disk is None:
        return ()
    num_bytes = int(disk.gb * 2**30 / num_members)
    return (
        "--disk-bytes", str(num_bytes), "--disk-dir", str(disk.folder), "--disk-fingerprint", disk.fingerprint
    )  # fmt: skip
