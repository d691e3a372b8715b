"""The key book as a running server sees it: read again when another process has changed it.

| the server | becomes | when |
|---|---|---|
| open, as it was started | keyed | the book has a key |
| keyed | | never anything else |

Open is what a server was started as, never what it finds later. A keyed server whose book is gone, damaged, empty or
without keys goes on with the last reading for a while; then nobody comes in until a book with keys is back.

A look costs microseconds and happens at most twice a second, when somebody asks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tripool.tenants.key_store import KeyStore, KeyStoreError, KeyStoreMissing
from tripool.tenants.key_table import KeyTable

_LOG = logging.getLogger("tripool.tenants")
LOOK_S = 0.5
"""How long a change, such as a revoked key, may go unnoticed."""
STALE_S = 30.0
"""How long the last reading of a book counts when it cannot be read any more."""
_BUSY_S = 0.1
"""Readers do not wait for writers; this is for the rare moment when the file itself is being made."""
_SIDE_FILES = ("-wal", "-shm")


def _nothing() -> None:
    pass


class KeyWatcher:
    """For one thread. `on_keyed` is called once, before the first key of a server that was open counts."""

    def __init__(
        self,
        path: Path,
        *,
        may_be_open: bool,
        on_keyed: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.is_open = may_be_open
        """As of the last `key_table`."""
        self._on_keyed, self._clock = on_keyed, clock
        self._key_store: KeyStore | None = None
        self._files: tuple[object, ...] = ()
        """Which files `_key_store` has open."""
        self._version: int | None = None
        self._key_table = KeyTable()
        self._error: KeyStoreError | None = None
        self._looked_s = clock()
        self._read_s = float("-inf")
        self._look()

    def key_table(self) -> KeyTable:
        """Raises KeyStoreError when there is no reading that still counts."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        if self._error is not None and now_s - self._read_s >= STALE_S:
            raise self._error
        return self._key_table

    def close(self) -> None:
        if self._key_store is not None:
            self._key_store.close()
            self._key_store = None

    def _look(self) -> None:
        try:
            self._read()
        except KeyStoreError as error:
            self.close()
            if self._error is None:
                _LOG.warning("the key book cannot be read", extra={"path": str(self.path), "reason": str(error)})
            self._error = error
        else:
            if self._error is not None:
                _LOG.info("the key book is read again", extra={"path": str(self.path)})
            self._error, self._read_s = None, self._looked_s

    def _read(self) -> None:
        files = self._files_now()
        if self._key_store is None or files != self._files:
            # Other files in the same place: SQLite would go on with those that it has open, and see no change.
            self.close()
            self._files = self._files_now()
            try:
                self._key_store, self._version = KeyStore(self.path, busy_s=_BUSY_S), None
            except KeyStoreMissing:
                if self.is_open:
                    return
                raise
        version = self._key_store.version()
        if version != self._version:
            self._take(self._key_store.key_table(None if self._version is None else self._key_table))
            if self._version is None:  # the side files may have come with the first reading
                self._files = (self._files[0], *self._files_now()[1:])
            self._version = version

    def _take(self, key_table: KeyTable) -> None:
        if not key_table.keys and not self.is_open:
            hint = "put the one with the keys back; a server that had keys does not become open"
            raise KeyStoreError(f"the key book {self.path} has no keys any more", hint=hint)
        if key_table.keys and self.is_open:
            self._on_keyed()
            self.is_open = False
        self._key_table = key_table

    def _files_now(self) -> tuple[object, ...]:
        """Other values when the book or one of its side files is another file, or the book was overwritten in place."""
        found: list[object] = []
        for suffix in ("", *_SIDE_FILES):
            try:
                there = Path(f"{self.path}{suffix}").stat()
            except FileNotFoundError:
                found.append(None)
            except OSError as error:
                raise KeyStoreError(f"the key book {self.path} cannot be reached: {error.strerror}") from error
            else:
                written = () if suffix else (there.st_size, there.st_mtime_ns)
                found.append((there.st_dev, there.st_ino, there.st_mode, *written))
        return tuple(found)
