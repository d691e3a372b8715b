"""The tables of the store of files and batches, and their rows as data."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from tripool.batch.types import OPEN, Batch, StoredFile

IS_OPEN = f"status IN ({', '.join('?' * len(OPEN))})"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS files_of ON files (tenant);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL,
    times TEXT NOT NULL DEFAULT '{}', errors TEXT NOT NULL DEFAULT '[]', output_file_id TEXT, error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    answer_bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX IF NOT EXISTS batches_of ON batches (tenant);
CREATE INDEX IF NOT EXISTS batches_in ON batches (status);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL,
    custom_id TEXT NOT NULL, status_code INTEGER, entry BLOB, PRIMARY KEY (batch_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_lines ON lines (batch_id, number) WHERE status_code IS NULL;
"""


def make_tables(db: sqlite3.Connection) -> None:
    db.executescript(_SCHEMA)
    if "answer_bytes" not in {row[1] for row in db.execute("PRAGMA table_info(batches)")}:  # made before it was counted
        db.execute("ALTER TABLE batches ADD COLUMN answer_bytes INTEGER NOT NULL DEFAULT 0")


def read_files(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> Iterator[StoredFile]:
    names = ("id", "tenant", "purpose", "filename", "num_bytes", "created_s", "expires_s")
    for row in db.execute(f"SELECT {', '.join(names)} FROM files {where}", values):
        yield StoredFile(**dict(zip(names, row, strict=True)))


_COLUMNS = (
    "id", "tenant", "key", "endpoint", "input_file_id", "window", "metadata", "status", "created_s", "expires_s",
    "times", "errors", "output_file_id", "error_file_id", "total", "completed", "failed",
)  # fmt: skip


def read_batches(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> Iterator[Batch]:
    for row in db.execute(f"SELECT {', '.join(_COLUMNS)} FROM batches {where}", values):
        found = dict(zip(_COLUMNS, row, strict=True))
        for name in ("metadata", "times", "errors"):
            found[name] = None if found[name] is None else json.loads(found[name])
        yield Batch(**found)
