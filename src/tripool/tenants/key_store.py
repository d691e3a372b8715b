"""The key store: tenants, their keys and their usage, in one SQLite file that only its owner can read.

Server and command line open the same file at the same time. Every wait for the other is bounded; a change is on disk
when the call returns. The file must be on a local disk: SQLite's write-ahead log needs memory shared between processes.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tripool.errors import InvalidRequest, TripoolError
from tripool.tenants.key_table import KEY_MARK, Key, KeyTable, Limits, Tenant, key_digest

SCHEMA = 1
BUSY_S = 2.0
"""Longest wait for another process that writes."""
_LOOK_S = 0.005
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHOWN_CHARS = 8
_SETTINGS = ("rpm", "tpm", "cache_bytes", "weight", "tpot_ms", "ttft_ms", "public_prefix")

_TABLES = """
CREATE TABLE book (pepper BLOB NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, namespace TEXT NOT NULL UNIQUE, created_s REAL NOT NULL,
    rpm REAL, tpm REAL, cache_bytes INTEGER, weight REAL NOT NULL DEFAULT 1.0,
    tpot_ms REAL, ttft_ms REAL, public_prefix INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE keys (
    prefix TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants (name), digest BLOB NOT NULL UNIQUE,
    admin INTEGER NOT NULL, created_s REAL NOT NULL, last_used_s REAL, expires_s REAL, revoked_s REAL
) STRICT;
CREATE TABLE usage (
    hour_s INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY (hour_s, tenant, key, model)
) STRICT, WITHOUT ROWID;
"""


class KeyStoreError(TripoolError, status=503, code="bad_key_book"):
    """The key store cannot be read or written."""


class KeyStoreMissing(KeyStoreError, code="no_key_book"):
    """There is no key store at the given path."""


class TenantUnknown(TripoolError, status=404, code="tenant_unknown"):
    """The key store has no such tenant."""


class KeyUnknown(TripoolError, status=404, code="key_unknown"):
    """The key store has no such key."""


def default_path() -> Path:
    """The key store's path when none is given."""
    home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    return state / "tripool" / "keys.db"


class KeyStore:
    """One connection. For one thread at a time, any thread."""

    def __init__(self, path: Path, *, create: bool = False, busy_s: float = BUSY_S) -> None:
        """Without `create` the file must exist: readers and the usage log never create an empty one."""
        self.path = path
        with _typed_errors(path):
            if create:
                _make_private(path)
            _check_private(path)
            uri = f"{path.absolute().as_uri()}?mode=rw"
            self._db = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
            try:
                self._check_schema(may_be_empty=create)
                self._write_ahead(busy_s)
                self._prepare()
            except (sqlite3.Error, KeyStoreError):
                self._db.close()
                raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> KeyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A read transaction."""
        with _typed_errors(self.path):
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: all or nothing."""
        with _typed_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """As `writing`, for changes that running servers must notice."""
        with self.writing() as db:
            yield db
            db.execute("UPDATE book SET generation = generation + 1")

    def version(self) -> int:
        """Changes once another process has written anything. Cheap."""
        with _typed_errors(self.path):
            number: int = self._db.execute("PRAGMA data_version").fetchone()[0]
            return number

    def key_table(self, known: KeyTable | None = None) -> KeyTable:
        """All tenants and keys; `known` itself if nothing has changed."""
        with self.reading() as db:
            pepper, generation = db.execute("SELECT pepper, generation FROM book").fetchone()
            if known is not None and known.generation == generation:
                return known
            tenants = [_tenant(row) for row in _rows(db, "SELECT * FROM tenants ORDER BY name")]
            keys = [_key(row) for row in _rows(db, "SELECT * FROM keys ORDER BY created_s, prefix")]
        return KeyTable(tenants, keys, pepper=pepper, generation=generation)

    # ---- changes ------------------------------------------------------------------------------------------------

    def add_key(
        self,
        name: str,
        *,
        now_s: float,
        settings: Mapping[str, float | int | bool | None] | None = None,
        admin: bool = False,
        expires_s: float | None = None,
    ) -> str:
        """Creates and returns a key, which is never shown again. The tenant is created with its first key; given
        settings replace the tenant's own.

        A tenant's namespace is random: no client input is part of it.
        """
        check_tenant(name, settings or {})
        key = KEY_MARK + secrets.token_urlsafe(32)
        prefix = key[: len(KEY_MARK) + _SHOWN_CHARS]
        with self._changing() as db:
            row = (name, _new_namespace(), now_s)
            db.execute("INSERT OR IGNORE INTO tenants (name, namespace, created_s) VALUES (?, ?, ?)", row)
            _set(db, name, settings or {})
            digest = key_digest(self._pepper(), key)
            columns = "prefix, tenant, digest, admin, created_s, expires_s"
            values = (prefix, name, digest, admin, now_s, expires_s)
            db.execute(f"INSERT INTO keys ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
        return key

    def revoke(self, which: str, *, now_s: float) -> list[str]:
        """The key with this prefix, or all keys of this tenant; returns the prefixes of those that were valid."""
        with self._changing() as db:
            column = "substr(prefix, 1, ?)" if which.startswith(KEY_MARK) else "tenant"
            values: tuple[Any, ...] = (len(which), which) if which.startswith(KEY_MARK) else (which,)
            found = db.execute(f"SELECT prefix, revoked_s FROM keys WHERE {column} = ?", values).fetchall()
            if not found:
                raise KeyUnknown(f"no key is called '{which[:100]}'", hint="`tripool keys list` shows them")
            if which.startswith(KEY_MARK) and len(found) > 1:
                raise InvalidRequest(f"{len(found)} keys begin with '{which}'", hint="give more of it", param="prefix")
            good = [prefix for prefix, revoked_s in found if revoked_s is None]
            db.executemany("UPDATE keys SET revoked_s = ? WHERE prefix = ?", [(now_s, prefix) for prefix in good])
        return good

    def change(self, name: str, settings: Mapping[str, float | int | bool | None]) -> None:
        with self._changing() as db:
            _must_exist(db, name)
            _set(db, name, settings)

    def renew_namespace(self, name: str) -> None:
        """From now on nothing that was cached for this tenant is found again."""
        with self._changing() as db:
            _must_exist(db, name)
            db.execute("UPDATE tenants SET namespace = ? WHERE name = ?", (_new_namespace(), name))

    # ---- internals ----------------------------------------------------------------------------------------------

    def _pepper(self) -> bytes:
        pepper: bytes = self._db.execute("SELECT pepper FROM book").fetchone()[0]
        return pepper

    def _write_ahead(self, busy_s: float) -> None:
        """Unlike everywhere else, SQLite does not wait for other processes here: retry until the deadline."""
        deadline_s = time.monotonic() + busy_s
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_LOOK_S)

    def _check_schema(self, *, may_be_empty: bool) -> int:
        schema: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        if schema == 0 and not may_be_empty:
            raise KeyStoreError(f"{self.path} is not a key store: it is empty", hint="restore it, or use another")
        if schema not in (0, SCHEMA):
            hint = "it was made by another version of Tripool: use that one, or another file"
            raise KeyStoreError(f"{self.path} is a key store of schema {schema}, not {SCHEMA}", hint=hint)
        return schema

    def _prepare(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")  # a revoked key stays revoked after a power cut
        self._db.execute("PRAGMA foreign_keys = ON")
        if self._db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA:
            return
        with self.writing() as db:
            if self._check_schema(may_be_empty=True) == 0:  # else another process has created it meanwhile
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO book VALUES (?, 1)", (secrets.token_bytes(32),))
                db.execute(f"PRAGMA user_version = {SCHEMA}")


def check_tenant(name: str, settings: Mapping[str, float | int | bool | None]) -> None:
    """Raises InvalidRequest for an invalid name or setting."""
    if not _NAME.fullmatch(name) or name.startswith(KEY_MARK):
        hint = f"1 to 64 letters, digits and . _ @ -, not beginning with '{KEY_MARK}'"
        raise InvalidRequest(f"'{name[:100]}' cannot be a tenant's name", hint=hint, param="name")
    _check_settings(settings)


def _make_private(path: Path) -> None:
    """Created readable for its owner alone. SQLite gives its side files the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _check_private(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise KeyStoreMissing(f"there is no key store {path}", hint="`tripool keys add NAME` makes one") from None
    if not stat.S_ISREG(found.st_mode):
        raise KeyStoreError(f"{path} is not a key store: it is not a file", hint="restore it, or use another")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyStoreError(
            f"{path} belongs to another user (uid {found.st_uid})", hint="that user could add keys to it"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise KeyStoreError(f"{path} can be read or written by others (mode {mode:o})", hint=f"chmod 600 {path}")


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Converts errors of SQLite and the file system."""
    try:
        yield
    except sqlite3.OperationalError as error:
        hint = "another process may be writing, or the disk may be full: try again"
        raise KeyStoreError(f"the key store {path} cannot be used: {error}", hint=hint) from error
    except sqlite3.DatabaseError as error:
        raise KeyStoreError(
            f"{path} is not a key store, or is damaged: {error}", hint="restore it, or use another"
        ) from error
    except OSError as error:
        raise KeyStoreError(f"the key store {path} cannot be opened: {error.strerror}", hint="--keys FILE") from error


def _new_namespace() -> str:
    return f"t-{secrets.token_hex(16)}"


def _must_exist(db: sqlite3.Connection, name: str) -> None:
    if db.execute("SELECT 1 FROM tenants WHERE name = ?", (name,)).fetchone() is None:
        raise TenantUnknown(f"there is no tenant '{name[:100]}'", hint="`tripool keys list` shows them")


def _check_settings(settings: Mapping[str, float | int | bool | None]) -> None:
    for column, value in settings.items():
        assert column in _SETTINGS, column
        if isinstance(value, float | int) and not (value > 0 or (value == 0 and column in _MAY_BE_ZERO)):
            raise InvalidRequest(f"{column} is {value!r}", hint="must be above 0", param=column)


def _set(db: sqlite3.Connection, name: str, settings: Mapping[str, float | int | bool | None]) -> None:
    _check_settings(settings)
    for column, value in settings.items():
        db.execute(f"UPDATE tenants SET {column} = ? WHERE name = ?", (value, name))


_MAY_BE_ZERO = ("cache_bytes", "public_prefix")


def _rows(db: sqlite3.Connection, query: str) -> Iterator[dict[str, Any]]:
    cursor = db.execute(query)
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)


def _tenant(row: Mapping[str, Any]) -> Tenant:
    limits = Limits(
        requests_per_minute=row["rpm"],
        tokens_per_minute=row["tpm"],
        cache_bytes=row["cache_bytes"],
        weight=row["weight"],
    )
    return Tenant(
        name=row["name"],
        namespace=row["namespace"],
        limits=limits,
        tpot_ms=row["tpot_ms"],
        ttft_ms=row["ttft_ms"],
        public_prefix=bool(row["public_prefix"]),
    )


def _key(row: Mapping[str, Any]) -> Key:
    return Key(**{**row, "admin": bool(row["admin"])})
