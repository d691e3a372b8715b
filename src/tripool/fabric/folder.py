"""The folder of one run: sockets and arenas, private to its user, gone with the last process that uses it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "tripool-"
_LOCK = "lock"
_OPEN_MARK = "open"


def memory_folder() -> Path:
    """Where files are memory; on a system without such a place, where temporary files go."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class RunFolder:
    """Made, and locked, by the supervisor. Its children inherit the lock's file, so it lasts as long as any of them."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or memory_folder()
        _sweep(parent)
        self.path, self.lock = _make(parent)
        while not (self.path / _LOCK).exists():  # taken for a dead run's by another's sweep, just before it was locked
            os.close(self.lock)
            self.path, self.lock = _make(parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _make(parent: Path) -> tuple[Path, int]:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def coordinator_address(folder: Path) -> str:
    """Where the coordinator of a run listens for workers."""
    return f"ipc://{folder}/coordinator.sock"


def gateways_address(folder: Path) -> str:
    """Where it listens for gateways."""
    return f"ipc://{folder}/gateways.sock"


def socket_path(address: str) -> str:
    assert address.startswith("ipc://")
    return address.removeprefix("ipc://")


def mark_open(folder: Path) -> None:
    """For the gateways of a run that starts open: it asks for no API keys until there is one."""
    (folder / _OPEN_MARK).touch(0o600)


def is_marked_open(folder: Path) -> bool:
    return (folder / _OPEN_MARK).exists()


def unmark_open(folder: Path) -> None:
    """Raises OSError."""
    (folder / _OPEN_MARK).unlink(missing_ok=True)


def folder_of(address: str) -> Path:
    """The run folder that a coordinator's local address lies in."""
    assert address.startswith("ipc://")
    return Path(address.removeprefix("ipc://")).parent


def run_folders(parent: Path) -> list[tuple[Path, bool]]:
    """Those of this user's runs, and of each whether all the processes that used it are dead."""
    found = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        lock = _open_lock(folder)
        if lock is not None:
            found.append((folder, _try_lock(lock)))
            os.close(lock)
    return found


def remove_if_stale(folder: Path) -> None:
    lock = _open_lock(folder)
    if lock is not None:
        if _try_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what runs of this user left behind when all their processes were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        remove_if_stale(folder)


def _open_lock(folder: Path) -> int | None:
    """None: not one of ours, or going away by itself."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None


def _try_lock(lock: int) -> bool:
    """False: in use."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
