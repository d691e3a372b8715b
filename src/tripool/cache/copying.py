"""Copies blocks and returns the checksum of each copy, in compiled code where available, else in numpy, bit for bit
equal.

The checksum is XXH3. For a large block it is the XXH3 of the hashes of its four quarters, which are copied in parallel
streams. The compiled version makes one pass with non-temporal stores and uses a second core if one is idle. Both
versions release the GIL while they copy.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

Bytes = npt.NDArray[np.uint8]

FILE = Path(__file__).parent / "native" / "_copy.so"
_LARGE = 2**16
_WORTH_HELP = 2**18
"""Waking the helper thread takes about as long as copying this many bytes."""
_PAGE = 4096
_PIECE = 2**19
"""Bytes copied at a time, then hashed while they are still in the core's cache."""
_QUARTERS = struct.Struct("<4Q")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_uint64
_ARGUMENTS = {
    "tripool_copy": (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER),
    "tripool_copy_by": (ctypes.c_int, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER),
    "tripool_copy_soon": (),
    "tripool_hash": (ctypes.c_char_p, _SIZE),
    "tripool_read": (_POINTER, _SIZE, _POINTER, ctypes.c_char_p, _POINTER, _SIZE, _SIZE, _POINTER),
    "tripool_release": (_POINTER, _SIZE, _SIZE, _POINTER),
    "tripool_acquire": (_POINTER, _SIZE, ctypes.c_char_p, _SIZE, ctypes.c_char_p, _POINTER),
}
_RESULTS = {
    "tripool_copy_by": ctypes.c_int, "tripool_hash": _SIZE, "tripool_read": _SIZE, "tripool_acquire": ctypes.c_int,
}  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if it was not built, or was built for another machine or version."""
    try:
        loaded = ctypes.CDLL(str(FILE))
        functions = {name: getattr(loaded, name) for name in _ARGUMENTS}
    except (OSError, AttributeError):
        return None
    for name, function in functions.items():
        function.argtypes, function.restype = _ARGUMENTS[name], _RESULTS.get(name)
    return loaded


def wake_helper(num_bytes: int) -> None:
    """Wake the helper thread ahead of a copy of `num_bytes`, if the copy is large enough to need it."""
    compiled = library() if num_bytes >= _WORTH_HELP else None
    if compiled is not None:
        compiled.tripool_copy_soon()


def copy(source: Bytes, target: Bytes) -> int:
    """Copy `source` to `target` (contiguous, of equal length) and return the checksum of the copy."""
    size, compiled = len(source), library()
    assert len(target) == size
    if compiled is None or not is_compiled(size):
        return plain_copy(source, target)
    hashes = (ctypes.c_uint64 * 4)()
    compiled.tripool_copy(address(source), address(target), quarter(size), size, hashes)
    return xxh3_64_intdigest(bytes(hashes))


def is_compiled(size: int) -> bool:
    """Whether blocks of this size are copied by compiled code."""
    return size >= _LARGE and library() is not None


def plain_copy(source: Bytes, target: Bytes) -> int:
    return checksum_of([_copy_piece(source[part], target[part]) for part in hashed_parts(len(source))])


def checksum(data: memoryview) -> int:
    """The checksum that a copy of these bytes would have."""
    return checksum_of([xxh3_64_intdigest(data[part]) for part in hashed_parts(len(data))])


def checksum_of(hashes: Sequence[int]) -> int:
    """The checksum of a block whose parts have these hashes."""
    return hashes[0] if len(hashes) == 1 else xxh3_64_intdigest(_QUARTERS.pack(*hashes))


def hashed_parts(size: int) -> list[slice]:
    """Parts of a block that are hashed one by one: four, or the whole of a small one."""
    if size < _LARGE:
        return [slice(0, size)]
    return [slice(start, stop) for start, stop in pairwise([*range(0, 4 * quarter(size), quarter(size)), size])]


def quarter(size: int) -> int:
    """Bytes of one quarter, in whole pages; the last quarter also takes the remainder."""
    return size // 4 // _PAGE * _PAGE


class Staging:
    """Reusable page-aligned buffers of one size: page faults on fresh memory take longer than the copy, and
    non-temporal stores need aligned targets."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Bytes] = []

    def take(self, count: int) -> list[Bytes]:
        """The first `count` buffers, always the same ones; the previous user must be done with them."""
        while len(self._buffers) < count:
            buffer = mmap(-1, max(1, self._num_bytes))
            self._buffers.append(np.frombuffer(buffer, np.uint8, self._num_bytes))
        return self._buffers[:count]


def address(array: Bytes) -> int:
    """Address of the first byte. `from_buffer` is twice as fast as the array interface and four times as fast as
    `.ctypes`.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except TypeError:  # read-only
        start: int = array.__array_interface__["data"][0]
        return start


def _copy_piece(source: Bytes, target: Bytes) -> int:
    hasher = xxh3_64()
    for start in range(0, len(source), _PIECE):
        piece = target[start : start + _PIECE]
        piece[:] = source[start : start + _PIECE]
        hasher.update(piece.data)
    return hasher.intdigest()
