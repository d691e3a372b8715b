"""The store of files and batches: one SQLite database and a folder of files, for the processes of one server.

Every change is on disk when a call returns. An answer is written once, with the counts of its batch, in one
transaction; what was not written when the server died is computed again. The output of a batch becomes a file before
the batch is marked as ended, and is written again if the server dies in between.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tripool.batch.store_tables import IS_OPEN, make_tables, read_batches, read_files
from tripool.batch.types import (
    OPEN,
    Answered,
    Batch,
    BatchOver,
    BatchUnknown,
    FileInUse,
    FileUnknown,
    Line,
    Status,
    StorageFull,
    StoredFile,
    StoreFailed,
)

TENANT_BYTES = 4 * 10**9
"""Of one tenant's files, and of the answers of its open batches."""
TENANT_FILES = 10_000
"""Files of one tenant, beyond which it may not upload more."""
TENANT_OPEN, TENANT_BATCHES = 100, 10_000
"""Batches of one tenant that have not ended, and all that are known."""
_KEPT_S = 30 * 86_400
"""How long outputs are kept, and batches after their end."""
_DELETE = "delete files that are no longer needed"


class BatchStore:
    """For any thread; one call at a time. `folder` is locked: a second server with the same one is refused. `locked`:
    by another process of this server, as a file descriptor that this one has inherited."""

    def __init__(
        self, folder: Path, *, locked: int | None = None, tenant_bytes: int = TENANT_BYTES,
        tenant_open: int = TENANT_OPEN,
    ) -> None:  # fmt: skip
        self._folder, self._tenant_bytes, self._tenant_open = folder, tenant_bytes, tenant_open
        self._lock = threading.Lock()
        try:
            (folder / "files").mkdir(0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self._locked = os.open(folder / "lock", flags, 0o600) if locked is None else os.dup(locked)
        except OSError as error:
            raise _failed(folder, error.strerror or str(error)) from error
        try:
            if locked is None:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = sqlite3.connect(folder / "batches.db", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            make_tables(self._db)
            if locked is None:  # else uploads to other processes may be under way
                self._drop_strays()
        except BlockingIOError as error:
            os.close(self._locked)
            raise _failed(folder, "another server uses it; name a folder for each with --batch-dir") from error
        except sqlite3.Error as error:
            os.close(self._locked)
            raise _failed(folder, str(error)) from error

    @property
    def locked(self) -> int:
        """The folder's lock, as a file descriptor."""
        return self._locked

    def close(self) -> None:
        with self._lock:
            self._db.close()
            os.close(self._locked)

    # ---- files ------------------------------------------------------------------------------------------------------

    def room(self, tenant: str) -> int:
        """Bytes that the tenant may still store."""
        with self._transaction() as db:
            return self._tenant_bytes - self._used(db, tenant)

    def full_tenants(self) -> frozenset[str]:
        """Those with open batches and without room for their answers."""
        with self._transaction() as db:
            tenants = [row[0] for row in db.execute(f"SELECT DISTINCT tenant FROM batches WHERE {IS_OPEN}", OPEN)]
            return frozenset(one for one in tenants if self._used(db, one) >= self._tenant_bytes)

    def upload_path(self) -> Path:
        """For the bytes of a new file, before `add_file`; removed at the next start if that is never called."""
        return self._folder / "files" / f"upload-{secrets.token_hex(12)}"

    def add_file(
        self, tenant: str, purpose: str, filename: str, uploaded: Path, now_s: int, expires_s: int | None = None
    ) -> StoredFile:
        num_bytes = uploaded.stat().st_size
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}", tenant=tenant, purpose=purpose, filename=filename,
            num_bytes=num_bytes, created_s=now_s, expires_s=expires_s,
        )  # fmt: skip
        with self._transaction() as db:
            if self._used(db, tenant) + num_bytes > self._tenant_bytes:
                raise StorageFull(f"files may take {self._tenant_bytes} bytes in all", hint=_DELETE)
            if db.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()[0] >= TENANT_FILES:
                raise StorageFull(f"there are {TENANT_FILES} files already", hint=_DELETE)
            self._keep(db, file, uploaded)
        return file

    def _keep(self, db: sqlite3.Connection, file: StoredFile, made: Path) -> None:
        """In a transaction: the file is there before its row is."""
        os.replace(made, self.path(file.id))
        values = (file.id, file.tenant, file.purpose, file.filename, file.num_bytes, file.created_s, file.expires_s)
        db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def file(self, tenant: str, file_id: str) -> StoredFile:
        with self._transaction() as db:
            return self._file(db, tenant, file_id)

    def _file(self, db: sqlite3.Connection, tenant: str, file_id: str) -> StoredFile:
        found = next(read_files(db, "WHERE tenant = ? AND id = ?", (tenant, file_id)), None)
        if found is None:
            raise FileUnknown(f"there is no file '{file_id[:100]}'", hint="GET /v1/files lists those of this key")
        return found

    def files(self, tenant: str, *, purpose: str | None = None, ascending: bool = False) -> list[StoredFile]:
        order = "ASC" if ascending else "DESC"
        with self._transaction() as db:
            where = "WHERE tenant = ? AND (? IS NULL OR purpose = ?)"
            return list(read_files(db, f"{where} ORDER BY rowid {order}", (tenant, purpose, purpose)))

    def path(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    def delete_file(self, tenant: str, file_id: str) -> None:
        with self._transaction() as db:
            self._file(db, tenant, file_id)
            self._check_unused(db, file_id)
            self._remove(db, file_id)

    def _check_unused(self, db: sqlite3.Connection, file_id: str) -> None:
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND {IS_OPEN}"
        used = db.execute(query, (file_id, *OPEN)).fetchone()
        if used is not None:
            raise FileInUse(f"batch '{used[0]}' reads '{file_id}'", hint="cancel it first, or wait for its end")

    def _remove(self, db: sqlite3.Connection, file_id: str) -> None:
        db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def add_batch(
        self, tenant: str, key: str, endpoint: str, input_file_id: str, *,
        window: str, window_s: int, metadata: dict[str, str] | None, now_s: int,
    ) -> Batch:  # fmt: skip
        batch_id = f"batch_{secrets.token_hex(12)}"
        with self._transaction() as db:
            self._file(db, tenant, input_file_id)
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND {IS_OPEN}"
            if db.execute(query, (tenant, *OPEN)).fetchone()[0] >= self._tenant_open:
                raise StorageFull(f"{self._tenant_open} batches are open", hint="wait for one to end, or cancel it")
            written = None if metadata is None else json.dumps(metadata)
            values = (batch_id, tenant, key, endpoint, input_file_id, window, written, "validating", now_s)
            names = "id, tenant, key, endpoint, input_file_id, window, metadata, status, created_s, expires_s"
            db.execute(f"INSERT INTO batches ({names}) VALUES ({', '.join('?' * 10)})", (*values, now_s + window_s))
            oldest = "SELECT rowid FROM batches WHERE tenant = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?"
            gone = f"DELETE FROM batches WHERE rowid IN ({oldest}) AND NOT {IS_OPEN}"
            db.execute(gone, (tenant, TENANT_BATCHES, *OPEN))
            return self._batch(db, tenant, batch_id)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        with self._transaction() as db:
            return self._batch(db, tenant, batch_id)

    def _batch(self, db: sqlite3.Connection, tenant: str | None, batch_id: str) -> Batch:
        found = next(read_batches(db, "WHERE id = ? AND (? IS NULL OR tenant = ?)", (batch_id, tenant, tenant)), None)
        if found is None:
            raise BatchUnknown(f"there is no batch '{batch_id[:100]}'", hint="GET /v1/batches lists those of this key")
        return found

    def batches(self, tenant: str) -> list[Batch]:
        """The newest first."""
        with self._transaction() as db:
            return list(read_batches(db, "WHERE tenant = ? ORDER BY rowid DESC", (tenant,)))

    def open_batches(self) -> list[Batch]:
        """Of all tenants, the oldest first."""
        with self._transaction() as db:
            return list(read_batches(db, f"WHERE {IS_OPEN} ORDER BY rowid", OPEN))

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> Batch:
        with self._transaction() as db:
            batch = self._batch(db, tenant, batch_id)
            if batch.status not in OPEN:
                raise BatchOver(f"the batch is {batch.status}", hint="it has ended already")
            if batch.status in ("validating", "in_progress"):
                self._move(db, batch, "cancelling", now_s)
            return self._batch(db, tenant, batch_id)

    def start(self, batch_id: str, lines: Sequence[Line], errors: Sequence[dict[str, Any]], now_s: int) -> Batch:
        """Its input file was read: it runs, or has failed if there are errors."""
        with self._transaction() as db:
            batch = self._batch(db, None, batch_id)
            if batch.status != "validating":  # cancelled meanwhile
                return batch
            if errors:
                db.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(list(errors)), batch_id))
                self._move(db, batch, "failed", now_s)
            else:
                rows = ((line.batch_id, line.number, line.offset, line.size, line.custom_id) for line in lines)
                names = "batch_id, number, offset, size, custom_id"
                db.executemany(f"INSERT OR IGNORE INTO lines ({names}) VALUES (?, ?, ?, ?, ?)", rows)
                db.execute("UPDATE batches SET total = ? WHERE id = ?", (len(lines), batch_id))
                self._move(db, batch, "in_progress", now_s)
            return self._batch(db, None, batch_id)

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Lines without an answer, from `after` on."""
        query = (
            "SELECT batch_id, number, offset, size, custom_id FROM lines "
            "WHERE batch_id = ? AND number > ? AND status_code IS NULL ORDER BY number LIMIT ?"
        )
        with self._transaction() as db:
            return [Line(*row) for row in db.execute(query, (batch_id, after, limit))]

    def answered(self, answers: Iterable[Answered]) -> None:
        """Write answers. A line that has one already keeps it."""
        with self._transaction() as db:
            for one in answers:
                values = (one.status_code, one.entry, one.batch_id, one.number)
                sql = "UPDATE lines SET status_code = ?, entry = ? WHERE batch_id = ? AND number = ? "
                if db.execute(f"{sql} AND status_code IS NULL", values).rowcount:
                    column = "completed" if one.status_code == 200 else "failed"
                    counts = f"{column} = {column} + 1, answer_bytes = answer_bytes + ?"
                    db.execute(f"UPDATE batches SET {counts} WHERE id = ?", (len(one.entry), one.batch_id))

    def finish(self, batch_id: str, now_s: int, unanswered: dict[str, str]) -> Batch:
        """Write its output and error files and mark it as ended. `unanswered`: the error of lines without an answer."""
        with self._transaction() as db:
            batch = self._batch(db, None, batch_id)
            if batch.status not in OPEN:
                return batch
            skip = "cancelling" in batch.times
            last: Status = "cancelled" if skip else "completed" if batch.is_answered else "expired"
            if not skip:
                self._move(db, batch, "finalizing", now_s)
        outputs = self._write_output(batch, unanswered, good=True, skip_open=skip)
        errors = self._write_output(batch, unanswered, good=False, skip_open=skip)
        with self._transaction() as db:
            for column, made in (("output_file_id", outputs), ("error_file_id", errors)):
                if made is not None:
                    file = StoredFile(
                        id=f"file-{secrets.token_hex(12)}", tenant=batch.tenant, purpose="batch_output",
                        filename=f"{batch_id}_{column.partition('_')[0]}.jsonl", num_bytes=made.stat().st_size,
                        created_s=now_s, expires_s=now_s + _KEPT_S,
                    )  # fmt: skip
                    self._keep(db, file, made)
                    db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, batch_id))
            if last == "expired":
                failed = batch.total - batch.completed
                db.execute("UPDATE batches SET failed = ? WHERE id = ?", (failed, batch_id))
            db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            db.execute("UPDATE batches SET answer_bytes = 0 WHERE id = ?", (batch_id,))
            self._move(db, self._batch(db, None, batch_id), last, now_s)
            return self._batch(db, None, batch_id)

    def _write_output(self, batch: Batch, unanswered: dict[str, str], *, good: bool, skip_open: bool) -> Path | None:
        path = self.upload_path()
        try:
            count = self._write_entries(path, batch, unanswered, good=good, skip_open=skip_open)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _failed(self._folder, str(error)) from error
        if not count:
            path.unlink()
        return path if count else None

    def _write_entries(
        self, path: Path, batch: Batch, unanswered: dict[str, str], *, good: bool, skip_open: bool
    ) -> int:
        """Returns how many there are."""
        which = "status_code = 200" if good else "(status_code != 200 OR status_code IS NULL)"
        query = f"SELECT number, custom_id, entry FROM lines WHERE batch_id = ? AND {which} AND number > ?"
        last = count = 0
        with path.open("wb") as file:
            while True:
                with self._transaction() as db:
                    rows = db.execute(f"{query} ORDER BY number LIMIT 256", (batch.id, last)).fetchall()
                if not rows:
                    break
                for number, custom_id, entry in rows:
                    last = number
                    if entry is None and skip_open:
                        continue
                    count += 1
                    file.write((entry or not_run(batch.id, number, custom_id, unanswered)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return count

    def expire(self, now_s: int) -> None:
        """Remove files whose time is over, and batches that ended long ago."""
        with self._transaction() as db:
            db.execute(f"DELETE FROM batches WHERE expires_s <= ? AND NOT {IS_OPEN}", (now_s - _KEPT_S, *OPEN))
            for file in list(read_files(db, "WHERE expires_s <= ?", (now_s,))):
                try:
                    self._check_unused(db, file.id)
                except FileInUse:
                    continue
                self._remove(db, file.id)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _move(self, db: sqlite3.Connection, batch: Batch, status: Status, now_s: int) -> None:
        times = json.dumps(batch.times | {status: now_s})
        db.execute("UPDATE batches SET status = ?, times = ? WHERE id = ?", (status, times, batch.id))

    def _used(self, db: sqlite3.Connection, tenant: str) -> int:
        files = "SELECT coalesce(sum(num_bytes), 0) FROM files WHERE tenant = ?"
        answers = f"SELECT coalesce(sum(answer_bytes), 0) FROM batches WHERE tenant = ? AND {IS_OPEN}"
        parts = db.execute(files, (tenant,)).fetchone(), db.execute(answers, (tenant, *OPEN)).fetchone()
        return sum(int(part[0]) for part in parts)

    def _drop_strays(self) -> None:
        """Files of uploads, outputs and deletions that a server's death left half done."""
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in (self._folder / "files").iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:
                raise _failed(self._folder, str(error)) from error


def not_run(batch_id: str, number: int, custom_id: str, error: dict[str, str]) -> bytes:
    """The entry of a line that was not run."""
    return json.dumps(
        {"id": f"batch_req_{batch_id[6:]}_{number}", "custom_id": custom_id, "response": None, "error": error}
    ).encode()


def _failed(folder: Path, why: str) -> StoreFailed:
    return StoreFailed(f"the batches in {folder} cannot be stored: {why}", hint="see `tripool serve --batch-dir`")
