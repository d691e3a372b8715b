"""A model's final tensors as one file of shared memory: written once, then mapped by every process that needs them.

| bytes | what |
|---|---|
| 0 to 63 | the head: a magic word, where the table is, its length and checksum |
| from 64 | tensors, each at a multiple of 64, in the order in which they were kept |
| the end | the table: facts about the model, and label, type, shape, place and checksum of each tensor |

Knows bytes, types by name and shapes; nothing of networks, and no torch. The mapping is private: pages that nobody
writes are the file's own, shared by all who map it, and a stray write reaches no one else. A reader's shared lock lives
as long as its mapping, because the mapping has the file open: who gets the exclusive lock knows that nobody reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from tripool.errors import TripoolError

MAGIC = b"TRIPOOL\x01"
ALIGN = 64
_HEAD = struct.Struct("<8sQQQ")
_MAX_TABLE_BYTES = 2**30
_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # macOS overcommits anyway
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE  # torch wants memory that could be written; see above


class WeightImageDamaged(TripoolError):
    """An image is not what it says, or not of this model: it is a miss, and is replaced."""

    code = "image_damaged"


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    label: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int


class _Table(msgspec.Struct, frozen=True):
    key: str
    facts: bytes
    tensors: tuple[Tensor, ...]


class WeightImage:
    """One that is whole, mapped. Views of it keep it mapped, and locked against removal, after it is gone itself."""

    def __init__(self, map_: mmap.mmap, table: _Table) -> None:
        self._map = map_
        self.facts, self.tensors = table.facts, table.tensors

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def view(self, tensor: Tensor) -> memoryview:
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.num_bytes]


def open_weight_image(path: Path, key: str) -> WeightImage | None:
    """None: there is none (any more). Every byte is checked: an image is read by many, for long, and from memory."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightImageDamaged(f"it cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise WeightImageDamaged("it is no file of this user alone")
        if found.st_nlink == 0:
            return None  # removed between the two
        if found.st_size < _HEAD.size:
            raise WeightImageDamaged("it ends before its head does")
        map_ = mmap.mmap(file, found.st_size, flags=_FLAGS, prot=_PROTECTION)
    except BlockingIOError:
        return None  # being removed
    finally:
        os.close(file)  # the mapping has it open by itself, and with it the lock
    return WeightImage(map_, _checked(map_, key))


def _checked(map_: mmap.mmap, key: str) -> _Table:
    data = memoryview(map_)
    magic, start, length, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC or length > _MAX_TABLE_BYTES or start + length != len(data):
        raise WeightImageDamaged("its head is wrong")
    if xxh3_64_intdigest(data[start:]) != checksum:
        raise WeightImageDamaged("the checksum of its table is wrong")
    try:
        table = msgspec.msgpack.decode(data[start:], type=_Table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightImageDamaged(f"its table cannot be read: {error}") from error
    if table.key != key:
        raise WeightImageDamaged("it is of another model")
    for tensor in table.tensors:
        stop = tensor.offset + tensor.num_bytes
        if tensor.offset < ALIGN or tensor.num_bytes < 0 or stop > start:
            raise WeightImageDamaged(f"'{tensor.label}' is not in it")
        if xxh3_64_intdigest(data[tensor.offset : stop]) != tensor.checksum:
            raise WeightImageDamaged(f"the checksum of '{tensor.label}' is wrong")
    return table


class WeightImageWriter:
    """Fills a new file. Mapped from the start with all the room it may need, which costs nothing until it is used; what
    was placed is read back through the mapping, so that each tensor exists once."""

    def __init__(self, path: Path, key: str, room_bytes: int) -> None:
        self._path, self._key = path, key
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.room_bytes = room_bytes
        self._end = ALIGN
        self._tensors: list[Tensor] = []
        try:
            os.ftruncate(self._file, room_bytes)
            fcntl.flock(self._file, fcntl.LOCK_SH)  # before it has its name: what is mapped is never removed
            self._map = mmap.mmap(self._file, room_bytes, flags=_FLAGS, prot=_PROTECTION)
        except OSError:
            self.abandon()
            raise

    @property
    def num_bytes(self) -> int:
        return self._end

    def place(self, label: str, dtype: str, shape: Sequence[int], data: memoryview) -> memoryview | None:
        """Its bytes in the image; None when it does not fit. Raises OSError when the memory is full."""
        offset, num_bytes = self._end, data.nbytes
        if offset + num_bytes > self.room_bytes:
            return None
        self._write(data, offset)
        self._end = offset + -(-num_bytes // ALIGN) * ALIGN
        checksum = xxh3_64_intdigest(data)
        self._tensors.append(Tensor(label, dtype, tuple(shape), offset, num_bytes, checksum))
        return memoryview(self._map)[offset : offset + num_bytes]

    def seal(self, facts: bytes, path: Path) -> None:
        """Whole from now on, under its own name. The writer goes on using what it placed."""
        table = msgspec.msgpack.encode(_Table(self._key, facts, tuple(self._tensors)))
        self._write(memoryview(table), self._end)
        os.pwrite(self._file, _HEAD.pack(MAGIC, self._end, len(table), xxh3_64_intdigest(table)), 0)
        os.ftruncate(self._file, self._end + len(table))
        os.replace(self._path, path)
        self._close()

    def abandon(self) -> None:
        """No image. What was placed stays readable for as long as it is used."""
        self._path.unlink(missing_ok=True)
        self._close()

    def _write(self, data: memoryview, offset: int) -> None:
        data = data.cast("B") if data.nbytes else data
        while data.nbytes:
            written = os.pwrite(self._file, data[: 2**30], offset)
            data, offset = data[written:], offset + written

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
