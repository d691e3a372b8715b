"""What only one of several processes of a server does: a lock in the run folder, which the kernel frees at its end."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Duty:
    """`holds` once is for as long as the process lives."""

    def __init__(self, folder: Path, name: str) -> None:
        self._fd = os.open(folder / f"{name}.duty", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._holds = False

    def holds(self) -> bool:
        """Takes it up if nobody else does."""
        if not self._holds:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._holds = True
        return True

    def close(self) -> None:
        os.close(self._fd)
