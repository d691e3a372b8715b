"""Header of a GGUF file: metadata and tensor offsets, checked against the file's size.

An own parser, because the gguf package's reader creates several arrays per vocabulary string (seconds and hundreds of
megabytes for a small model) and does not detect a truncated file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tripool.checkpoints.gguf.kinds import BLOCKS, Kind
from tripool.checkpoints.mapped import MappedFile
from tripool.errors import CheckpointCorrupt, CheckpointTruncated, WrongDtype

MAGIC = b"GGUF"
READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_HEADER_BYTES = 2**26
MAX_ITEMS = 2**23
"""Limit for all lists of a header together, which become Python objects. Vocabularies have half a million items
at most.
"""

SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Value types by number, as `struct` letters. 8 is a string, 9 an array."""
FLOAT32, STRING, ARRAY = 6, 8, 9

Value = TypeVar("Value")
Item = TypeVar("Item", str, int, float)

REFETCH = "the download broke off; fetch the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    kind: Kind
    shape: tuple[int, ...]
    """Outermost first; the file lists them innermost first."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: Mapping[str, Any]
    """Metadata as stored, of any type: read it with the methods below."""
    tensors: Mapping[str, TensorEntry]
    prefix: str = ""
    """Before the keys that the methods below are given."""

    def under(self, prefix: str) -> Header:
        return replace(self, prefix=f"{prefix}.")

    def text(self, key: str, default: str | None = None) -> str | None:
        return self._of(key, default, str)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._of(key, default, int))

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self._of(key, default, int)
        if isinstance(value, bool):
            raise self.wrong(key)
        return value

    def items(self, key: str, kind: type[Item]) -> list[Item]:
        """Empty if the key is missing. Lists in a file have one type, so the first item tells it."""
        values = self._of(key, [], list)
        assert values is not None
        if values and not isinstance(values[0], kind):
            raise self.wrong(key)
        return values

    def wrong(self, key: str) -> CheckpointCorrupt:
        value = self.metadata.get(self.prefix + key)
        hint = "the file was converted wrongly; fetch it again or convert it again"
        shown = "missing" if value is None else f"{type(value).__name__} {str(value)[:50]!r}"
        return CheckpointCorrupt(f"{self.prefix}{key} is {shown}", hint=hint, file=self.path)

    def _of(self, key: str, default: Value | None, kind: type[Value]) -> Value | None:
        value = self.metadata.get(self.prefix + key, default)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key)
        return value


class _Cursor:
    """Reads forward through the mapped bytes; reading past the end raises CheckpointTruncated."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.position = 0
        self._bytes = file.view(0, min(file.num_bytes, MAX_HEADER_BYTES))
        self._items_left = MAX_ITEMS

    def take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self._bytes):
            problem = f"ends at byte {len(self._bytes)}, inside its header"
            raise CheckpointTruncated(problem, hint=REFETCH, file=self.path)
        piece = self._bytes[self.position : end]
        self.position = end
        return piece

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        piece = self.take(count * struct.calcsize(f"<{letter}"))
        return struct.unpack(f"<{count}{letter}", piece)

    def number(self, letter: str) -> Any:
        return self.numbers(letter)[0]

    def string(self) -> str:
        raw = bytes(self.take(self.number("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a string in the header is not UTF-8: {error.reason}") from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == FLOAT32:
            return shortest_float32(self.number("f"))
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.corrupt(f"the header holds a value of unknown type {kind}")
        item_kind, count = self.number("I"), self.number("Q")
        if count > len(self._bytes) - self.position:
            self.take(count)  # raises: each item takes at least one byte
        self._items_left -= count
        if self._items_left < 0:
            raise self.corrupt(f"the header claims lists of more than {MAX_ITEMS} values")
        if item_kind == STRING:
            return [self.string() for _ in range(count)]
        if item_kind not in SCALARS:
            raise self.corrupt(f"the header holds an array of unknown type {item_kind}")
        return list(self.numbers(SCALARS[item_kind], count))

    def corrupt(self, problem: str, tensor: str | None = None) -> CheckpointCorrupt:
        hint = "the file was written wrongly; fetch it again or convert it again"
        return CheckpointCorrupt(problem, hint=hint, file=self.path, tensor=tensor)


def shortest_float32(value: float) -> float:
    """Shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_header(file: MappedFile) -> Header:
    cursor = _Cursor(file)
    _check_magic(cursor, file.num_bytes)
    num_tensors, num_values = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"the header names '{key}' twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise cursor.corrupt(f"general.alignment is {alignment}")
    data_start = -(-cursor.position // alignment) * alignment
    return Header(file.path, metadata, _placed(cursor, entries, data_start, file.num_bytes))


def _check_magic(cursor: _Cursor, num_bytes: int) -> None:
    magic = bytes(cursor.take(min(4, num_bytes)))
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            raise CheckpointTruncated(f"ends after {num_bytes} bytes", hint=REFETCH, file=cursor.path)
        hint = "this is another kind of file, or a broken download; fetch it again"
        raise CheckpointCorrupt(f"not a GGUF file: it begins with {magic!r}", hint=hint, file=cursor.path)
    version = cursor.number("I")
    if version not in READABLE_VERSIONS:
        hint = f"readable versions: {', '.join(map(str, READABLE_VERSIONS))}, little-endian; convert the model again"
        raise WrongDtype(f"GGUF version {version} is not read", hint=hint, file=cursor.path)


def _entry(cursor: _Cursor) -> TensorEntry:
    """Offsets are still relative to the data section."""
    name = cursor.string()
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.corrupt(f"has {num_dimensions} dimensions", tensor=name)
    shape = tuple(reversed(cursor.numbers("Q", num_dimensions)))
    if 0 in shape:  # it takes no bytes, so the file size would not bound its other dimensions
        raise cursor.corrupt(f"is empty: {list(shape)}", tensor=name)
    number, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = Kind(number)
    except ValueError as error:
        hint = "a newer converter made this file; use another quantisation"
        raise WrongDtype(f"stored as GGML type {number}", hint=hint, file=cursor.path, tensor=name) from error
    block_values, block_bytes = BLOCKS[kind]
    if shape[-1] % block_values:
        raise cursor.corrupt(f"rows of {shape[-1]} values are not whole {kind.name} blocks", tensor=name)
    return TensorEntry(name, kind, shape, offset, offset + math.prod(shape) // block_values * block_bytes)


def _placed(cursor: _Cursor, entries: list[TensorEntry], data_start: int, num_bytes: int) -> dict[str, TensorEntry]:
    """Absolute offsets; checks that every tensor is inside the file and that none overlap."""
    placed: dict[str, TensorEntry] = {}
    previous_stop = data_start
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        start, stop = data_start + entry.start, data_start + entry.stop
        if entry.name in placed:
            raise cursor.corrupt("the header names it twice", tensor=entry.name)
        if start < previous_stop:
            raise cursor.corrupt("overlaps the tensor before it", tensor=entry.name)
        if stop > num_bytes:
            problem = f"its data ends at byte {stop}, the file at {num_bytes}"
            raise CheckpointTruncated(problem, hint=REFETCH, file=cursor.path, tensor=entry.name)
        placed[entry.name] = TensorEntry(entry.name, entry.kind, entry.shape, start, stop)
        previous_stop = stop
    return placed
