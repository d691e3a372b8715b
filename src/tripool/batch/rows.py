"""Rows of a table, in chunks: read from JSON lines, written as JSON lines. Parquet and SQL are in `arrow.py`.

A chunk is what is read and written together. Its rows may wait for answers in any order; chunks and rows are written
in the order in which they were read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tripool.batch.ask import BadRow, as_json
from tripool.batch.sources import MAX_ROW_BYTES, Slice

CHUNK_ROWS, CHUNK_BYTES = 256, 4 * 2**20


@dataclass(slots=True)
class Row:
    position: int | None
    """In the input; None for a row that a query made of others."""
    values: Mapping[str, Any]
    """At least of the columns that the templates use."""
    wrong: BadRow | None = None
    """Why it cannot be asked about."""


class Chunk(Protocol):
    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def num_bytes(self) -> int:
        """As it was read."""

    def records(self) -> Sequence[dict[str, Any]]:
        """All columns of all rows, as JSON has them."""


class Writer(Protocol):
    def write(self, chunk: Chunk, answers: Sequence[dict[str, Any] | None]) -> None:
        """The chunk's rows with the new columns; None: the row is left out."""

    def close(self) -> None:
        """All that was written is in the file."""


@dataclass(slots=True)
class JsonChunk:
    rows: Sequence[Row]
    num_bytes: int = 0

    def records(self) -> Sequence[dict[str, Any]]:
        return [dict(row.values) for row in self.rows]


class JsonWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, chunk: Chunk, answers: Sequence[dict[str, Any] | None]) -> None:
        for record, answer in zip(chunk.records(), answers, strict=True):
            if answer is not None:
                self._file.write(encode(record | answer))

    def close(self) -> None:
        self._file.flush()


def encode(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, default=as_json) + "\n").encode()


def numbered_lines(slices: Iterable[Slice]) -> Iterator[tuple[int, bytes]]:
    """(position, line) of all lines that are not blank. Of a line that is too long only the beginning is kept."""
    for part in slices:
        with Path(part.source.path).open("rb") as file:
            file.seek(part.offset)
            for number in range(part.begin, part.end):
                line = file.readline(MAX_ROW_BYTES + 1)
                end = line
                while end and len(end) > MAX_ROW_BYTES and not end.endswith(b"\n"):
                    end = file.readline(MAX_ROW_BYTES + 1)
                if line.strip():
                    yield part.source.first + number, line


def json_chunks(lines: Iterable[tuple[int, bytes]]) -> Iterator[JsonChunk]:
    rows: list[Row] = []
    num_bytes = 0
    for position, line in lines:
        rows.append(_row(position, line))
        num_bytes += len(line)
        if len(rows) >= CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
            yield JsonChunk(rows, num_bytes)
            rows, num_bytes = [], 0
    if rows:
        yield JsonChunk(rows, num_bytes)


def _row(position: int, line: bytes) -> Row:
    try:
        if len(line) > MAX_ROW_BYTES:
            raise ValueError(f"longer than {MAX_ROW_BYTES} bytes")
        values = json.loads(line, parse_constant=_no_constant)
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    except (ValueError, RecursionError) as error:
        return Row(position, {}, BadRow("bad_row", f"not a row of JSON: {error}"))
    return Row(position, values)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
