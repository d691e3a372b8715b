"""The key book as a running server sees it: read again when another process has changed it.

A look costs microseconds and happens at most twice a second, when somebody asks. A book that cannot be read is not an
open door: the last reading counts for a while, then nobody comes in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tripool.tenants.book import Book, BookError
from tripool.tenants.roll import Roll

LOOK_S = 0.5
"""How long a change, such as a revoked key, may go unnoticed."""
STALE_S = 30.0
"""How long the last reading of a book counts when it cannot be read any more."""
_BUSY_S = 0.1
"""Readers do not wait for writers; this is for the rare moment when the file itself is being made."""


class Watch:
    """For one thread. A book that is not there (yet) has no keys."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._book: Book | None = None
        self._inode = 0
        self._version: int | None = None
        self._roll = Roll()
        self._error: BookError | None = None
        self._read_s = self._looked_s = clock()
        self._look()
        if self._error is not None:
            raise self._error  # at the start there is no last reading to go on with

    def roll(self) -> Roll:
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
            if self._error is None:
                self._read_s = now_s
        if self._error is not None and now_s - self._read_s >= STALE_S:
            raise self._error
        return self._roll

    def close(self) -> None:
        if self._book is not None:
            self._book.close()
            self._book = None

    def _look(self) -> None:
        try:
            self._error = None
            self._read()
        except BookError as error:
            self._error = error

    def _read(self) -> None:
        inode = self._inode_now()
        if inode != self._inode or self._book is None:
            self.close()  # another file in the same place
            if not inode:
                if self._inode:
                    raise BookError(f"the key book {self.path} is gone", hint="put it back, or restart the server")
                return
            self._book, self._version = Book(self.path, busy_s=_BUSY_S), None
            self._inode = inode
        version = self._book.version()
        if version != self._version:
            self._roll = self._book.roll(None if self._version is None else self._roll)
            self._version = version

    def _inode_now(self) -> int:
        try:
            return self.path.stat().st_ino
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise BookError(f"the key book {self.path} cannot be reached: {error.strerror}") from error
