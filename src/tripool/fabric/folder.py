"""The folder of one run: sockets and arenas, private to its user, gone with the last process that uses it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "tripool-"
_LOCK = "lock"


def memory_folder() -> Path:
    """Where files are memory; on a system without such a place, where temporary files go."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class RunFolder:
    """Made, and locked, by the supervisor. Its children inherit the lock's file, so it lasts as long as any of them."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or memory_folder()
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def gateway_address(folder: Path) -> str:
    """Where the gateway of a run listens for workers."""
    return f"ipc://{folder}/gateway.sock"


def folder_of(address: str) -> Path:
    """The run folder that a gateway's local address lies in."""
    assert address.startswith("ipc://")
    return Path(address.removeprefix("ipc://")).parent


def _sweep(parent: Path) -> None:
    """Remove what runs of this user left behind when all their processes were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or going away by itself
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)
