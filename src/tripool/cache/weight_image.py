"""Weight image: a model's packed tensors as one file in shared memory, written once and mapped by every process.

| bytes | contents |
|---|---|
| 0 to 63 | the head: magic, offset, length and checksum of the table |
| from 64 | tensors, each at a multiple of 64, in the order in which they were placed |
| the end | the table: metadata of the model; label, dtype, shape, offset and checksum of each tensor |

Independent of torch and of network definitions. The mapping is private: unmodified pages are shared by all processes,
and a stray write affects no other process. The mapping keeps the file open and with it the reader's shared lock, so
holding the exclusive lock means that no process maps the file.
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
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE  # torch requires writable memory


class WeightImageDamaged(TripoolError):
    """The image is damaged or of another model: it counts as a miss and is replaced."""

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
    """A complete, mapped image. Views of it keep it mapped and locked after this object is gone."""

    def __init__(self, map_: mmap.mmap, table: _Table) -> None:
        self._map = map_
        self.facts, self.tensors = table.facts, table.tensors

    def view(self, tensor: Tensor) -> memoryview:
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.num_bytes]


def open_weight_image(path: Path, key: str) -> WeightImage | None:
    """Map an image and verify every checksum; None if it does not exist."""
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
            raise WeightImageDamaged("it is not a private file of this user")
        if found.st_nlink == 0:
            return None  # removed between open and lock
        if found.st_size < _HEAD.size:
            raise WeightImageDamaged("it is shorter than its head")
        map_ = mmap.mmap(file, found.st_size, flags=_FLAGS, prot=_PROTECTION)
    except BlockingIOError:
        return None  # being removed
    finally:
        os.close(file)  # the mapping keeps the file open, and the lock
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
    """Writes a new image. The file is mapped from the start at its largest size, which costs nothing until used; placed
    tensors are read back through the mapping, so that each tensor exists once."""

    def __init__(self, path: Path, key: str, room_bytes: int) -> None:
        self._path, self._key = path, key
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.room_bytes = room_bytes
        self._end = ALIGN
        self._tensors: list[Tensor] = []
        try:
            os.ftruncate(self._file, room_bytes)
            fcntl.flock(self._file, fcntl.LOCK_SH)  # before the rename: a mapped image is never removed
            self._map = mmap.mmap(self._file, room_bytes, flags=_FLAGS, prot=_PROTECTION)
        except OSError:
            self.abandon()
            raise

    def place(self, label: str, dtype: str, shape: Sequence[int], data: memoryview) -> memoryview | None:
        """Append a tensor; returns its bytes in the image, None if it does not fit. Raises OSError if full."""
        offset, num_bytes = self._end, data.nbytes
        if offset + num_bytes > self.room_bytes:
            return None
        self._write(data, offset)
        self._end = offset + -(-num_bytes // ALIGN) * ALIGN
        checksum = xxh3_64_intdigest(data)
        self._tensors.append(Tensor(label, dtype, tuple(shape), offset, num_bytes, checksum))
        return memoryview(self._map)[offset : offset + num_bytes]

    def seal(self, facts: bytes, path: Path) -> None:
        """Write the table and rename the file. The writer may go on using the placed tensors."""
        table = msgspec.msgpack.encode(_Table(self._key, facts, tuple(self._tensors)))
        self._write(memoryview(table), self._end)
        os.pwrite(self._file, _HEAD.pack(MAGIC, self._end, len(table), xxh3_64_intdigest(table)), 0)
        os.ftruncate(self._file, self._end + len(table))
        os.replace(self._path, path)
        self._close()

    def abandon(self) -> None:
        """Remove the file. Placed tensors stay readable while they are in use."""
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
