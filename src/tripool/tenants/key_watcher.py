"""A running server's view of the key store: reloaded when another process has changed it.

| the server | becomes | when |
|---|---|---|
| open, as it was started | keyed | the store has a key |
| keyed | | never anything else |

A server is open only if it was started so, never because of what it finds later. A keyed server whose store is missing,
damaged, empty or without keys goes on with the last reading for a while; then every request is refused until a store
with keys is back.

A check costs microseconds and happens at most twice a second, on demand.
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
"""How long the last reading counts when the store cannot be read any more."""
_BUSY_S = 0.1
"""Readers do not wait for writers; this covers the moment when the file is being created."""
_SIDE_FILES = ("-wal", "-shm")


class KeyWatcher:
    """For one thread. `on_keyed` is called once, before the first key of an open server takes effect."""

    def __init__(
        self,
        path: Path,
        *,
        may_be_open: bool,
        on_keyed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.is_open = may_be_open
        """As of the last `key_table`."""
        self._on_keyed, self._clock = on_keyed, clock
        self._key_store: KeyStore | None = None
        self._files: tuple[object, ...] = ()
        """Identity of the files that `_key_store` has open."""
        self._version: int | None = None
        self._key_table = KeyTable()
        self._error: KeyStoreError | None = None
        self._looked_s = clock()
        self._read_s = float("-inf")
        self._look()

    def key_table(self) -> KeyTable:
        """Raises KeyStoreError when no reading counts any more."""
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
                _LOG.warning("the key store cannot be read", extra={"path": str(self.path), "reason": str(error)})
            self._error = error
        else:
            if self._error is not None:
                _LOG.info("the key store is readable again", extra={"path": str(self.path)})
            self._error, self._read_s = None, self._looked_s

    def _read(self) -> None:
        files = self._files_now()
        if self._key_store is None or files != self._files:
            # The files were replaced: SQLite would keep using the ones it has open, and see no change.
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
            if self._version is None:  # the first read may have created the side files
                self._files = (self._files[0], *self._files_now()[1:])
            self._version = version

    def _take(self, key_table: KeyTable) -> None:
        if not key_table.keys and not self.is_open:
            hint = "restore the one with the keys; a server that had keys does not become open"
            raise KeyStoreError(f"the key store {self.path} no longer has keys", hint=hint)
        if key_table.keys and self.is_open:
            self._on_keyed()
            self.is_open = False
        self._key_table = key_table

    def _files_now(self) -> tuple[object, ...]:
        """Changes when the store or a side file was replaced, or the store was overwritten in place."""
        found: list[object] = []
        for suffix in ("", *_SIDE_FILES):
            try:
                there = Path(f"{self.path}{suffix}").stat()
            except FileNotFoundError:
                found.append(None)
            except OSError as error:
                raise KeyStoreError(f"the key store {self.path} cannot be reached: {error.strerror}") from error
            else:
                written = () if suffix else (there.st_size, there.st_mtime_ns)
                found.append((there.st_dev, there.st_ino, there.st_mode, *written))
        return tuple(found)
