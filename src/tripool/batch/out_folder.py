"""The output folder of a table job: its manifest, its finished partitions, and how a partition becomes finished.

| file | |
|---|---|
| `part-00000.parquet` or `.jsonl` | the rows of a partition with their answers |
| `_bad/part-00000.jsonl` | its bad rows, if it has any: file, row, code and reason |
| `_done/part-00000.json` | written last: the partition is finished, with its numbers of rows |
| `_manifest.json` | input, model and parameters, by which a later run knows that it continues this one |
| `_work/` | what is under way; removed at the end |

Each file is written beside, brought to disk and renamed, so that a reader sees whole files only, and a run that was
killed at any moment leaves either a finished partition or one that is run again, with the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tripool.batch.job import Format, OtherRun
from tripool.errors import TripoolError

_MANIFEST = "_manifest.json"
_VERSION = 1


class OutputFailed(TripoolError, status=507, code="output_failed"):
    """The output folder cannot be written; what is finished stays."""


class OutFolder:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.work = self.path / "_work"
        self._run = secrets.token_hex(8)
        """Not the process's id: that of another host may be the same."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For one run at a time."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "_lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OtherRun(
                    f"another run writes to {self.path}", hint="wait for it, or name another --out"
                ) from error
            yield
        finally:
            os.close(lock)

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """A new run, or the continuation of the one that is there."""
        wanted = json.loads(json.dumps({"version": _VERSION, **manifest}))
        with writing(self.path):
            found = self._manifest()
            if found is None:
                strange = [one.name for one in self.path.iterdir() if one.name not in ("_lock", "_work")]
                if strange:
                    raise OtherRun(f"{self.path} holds other files, such as {strange[0]}", hint="name an empty folder")
            elif found != wanted:
                names = sorted(name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name))
                settings = ", ".join(names)
                raise OtherRun(
                    f"{self.path} holds a run with other {settings}", hint="name another --out, or remove it"
                )
            self.work.mkdir(exist_ok=True)
            for left in self.work.glob("*.part-*"):
                left.unlink()
            if found is None:  # before anything else: a run that dies here is begun anew
                self._write(self.path / _MANIFEST, json.dumps(wanted, indent=1, ensure_ascii=False).encode() + b"\n")
            for name in ("_bad", "_done"):
                (self.path / name).mkdir(exist_ok=True)

    def finished(self) -> dict[int, dict[str, int]]:
        """Partitions that are done, with their numbers of rows and of bad ones."""
        with writing(self.path):
            paths = sorted((self.path / "_done").glob("part-*.json"))
            return {int(path.stem.removeprefix("part-")): json.loads(path.read_bytes()) for path in paths}

    def unfinished(self, number: int, name: str) -> Path:
        """Where a file of a partition is written. No two processes write to one path, should a task be run twice."""
        return self.work / f"{name}.part-{number:05}.{self._run}"

    def finish(self, number: int, format: Format, rows: Path, bad: Path | None, counts: Mapping[str, int]) -> None:
        """All of the partition is written."""
        stem = f"part-{number:05}"
        with writing(self.path):
            if bad is not None:
                _move(bad, self.path / "_bad" / f"{stem}.jsonl")
            _move(rows, self.path / f"{stem}.{format}")
            self._write(self.path / "_done" / f"{stem}.json", json.dumps(dict(counts)).encode())

    def end(self) -> None:
        """All partitions are finished."""
        with writing(self.path):
            shutil.rmtree(self.work, ignore_errors=True)

    def _manifest(self) -> Any:
        try:
            return json.loads((self.path / _MANIFEST).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            hint = "name another --out"
            raise OtherRun(f"{self.path / _MANIFEST} is not a manifest of a table job", hint=hint) from error

    def _write(self, path: Path, content: bytes) -> None:
        beside = self.work / f"{path.name}.part-{self._run}"
        beside.write_bytes(content)
        _move(beside, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputFailed(f"cannot write {path}: {error.strerror}", hint="run it again to go on") from error


def _move(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
