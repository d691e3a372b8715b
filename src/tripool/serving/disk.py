"""How a cache member is started: its memory, what is behind it (a disk, a Mooncake Store), and the fingerprint of the
model it holds blocks of. For the server's own members and for those of hosts that join."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tripool.cache.mooncake_store import store_class
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.config import EngineConfig
from tripool.control.launch import Spec
from tripool.core import BLOCK_TOKENS
from tripool.errors import DiskError, StoreMissing
from tripool.fabric.folder import RunFolder
from tripool.hosts.connection import parse_address
from tripool.hosts.join import address_towards
from tripool.hosts.models import code_identity, files_of, identity_of

_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True)
class Disk:
    gb: float
    folder: Path
    fingerprint: str


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return cache / "tripool" / "blocks"


def disk_of(gb: float, folder: Path | None, mark: str) -> Disk:
    """`mark`: a fingerprint. Raises DiskError if other users could replace the folder."""
    folder = (folder or default_folder()).absolute()
    try:
        make_private(folder)
    except NotPrivate as error:
        raise DiskError(error.message, hint=f"choose another --disk-dir: {error.hint}") from error
    except OSError:
        pass  # members report what is wrong with it, and go on with memory alone
    return Disk(gb, folder, mark)


def lasting_name(folder: Path) -> tuple[str, int]:
    """Of a member that finds its blocks in this folder again after its host has joined anew, and a locked file: as long
    as it is open no other has the name. Its name also decides which blocks it is asked for."""
    known = sorted(path.stem for path in folder.glob("*.name"))
    for name in (*known, f"cache-{secrets.token_hex(4)}"):
        lock = os.open(folder / f"{name}.name", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return name, lock
    raise AssertionError("a new name is free")


def fingerprint(model: str, config: EngineConfig, *, by_content: bool = False) -> str:
    """As `mark_of`. `by_content`: of the checkpoint's files, equal on every machine; otherwise by their sizes and
    times, at once. Raises CheckpointMissing without such a model."""
    return mark_of(config, _checkpoint(model, by_content))


def mark_of(config: EngineConfig, checkpoint: Iterable[str]) -> str:
    """Equal only if blocks are: same checkpoint, arithmetic and code. Blocks of another one are replaced."""
    said = blake2b(digest_size=16, person=b"tripool-disk")
    arithmetic = config.precision, config.device, str(config.mtp), str(config.exact)
    for word in (str(BLOCK_TOKENS), *arithmetic, *checkpoint, code_identity()):
        said.update(len(word.encode()).to_bytes(8, "little") + word.encode())
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


def reach_store(master: str) -> str:
    """This machine's address on the way to a Mooncake Store's master. Raises what is wrong, with the remedy."""
    host, port = parse_address(master)
    own = address_towards(master)
    store_class()
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        hint = "is `mooncake_master` running there, and is that its --rpc_port?"
        raise StoreMissing(f"no Mooncake Store's master at {master}: {error}", hint=hint) from error
    return own


def store_argv(master: str, own_address: str, mark: str) -> tuple[str, ...]:
    """For a member whose blocks are also in a Mooncake Store."""
    return ("--store-master", master, "--store-address", own_address, "--store-fingerprint", mark)


def disk_argv(disk: Disk | None, num_members: int) -> tuple[str, ...]:
    """For one of all members that share it."""
    if disk is None:
        return ()
    num_bytes = int(disk.gb * 2**30 / num_members)
    return (
        "--disk-bytes", str(num_bytes), "--disk-dir", str(disk.folder), "--disk-fingerprint", disk.fingerprint
    )  # fmt: skip


def member_spec(
    name: str, block_bytes: int, gb: float, folder: RunFolder, options: tuple[str, ...], fds: tuple[int, ...] = ()
) -> Spec:
    num_slots = max(1, int(gb * 2**30 / block_bytes))
    sizes = ("--slot-bytes", str(block_bytes), "--num-slots", str(num_slots))
    argv = ("cache-member", "--folder", str(folder.path), "--name", name, *sizes, *options)
    return Spec(name, argv, (folder.lock, *fds))
