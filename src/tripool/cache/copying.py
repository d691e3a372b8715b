"""Copies blocks and says the checksum of each copy: by compiled code where it is there, else by numpy, to the same bit.

The checksum is an XXH3; of a large block it is the XXH3 of those of its quarters, which are copied side by side. The
compiled version is a single pass past the caches, by two cores when one is idle. Both let go of the interpreter while
they work.
"""

from __future__ import annotations

import ctypes
import struct
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
"""To wake a helper takes as long as to copy this."""
_PAGE = 4096
_PIECE = 2**19
"""Copied, then hashed while it is still in the core's own cache."""
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
    """None where it was not compiled, or for another machine or version."""
    try:
        loaded = ctypes.CDLL(str(FILE))
        functions = {name: getattr(loaded, name) for name in _ARGUMENTS}
    except (OSError, AttributeError):
        return None
    for name, function in functions.items():
        function.argtypes, function.restype = _ARGUMENTS[name], _RESULTS.get(name)
    return loaded


def soon(num_bytes: int) -> None:
    """So much is about to be copied: if that is worth it, whoever helps had better wake up now."""
    compiled = library() if num_bytes >= _WORTH_HELP else None
    if compiled is not None:
        compiled.tripool_copy_soon()


def copy(source: Bytes, target: Bytes) -> int:
    """Contiguous, and of one length."""
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
    size = len(source)
    if size < _LARGE:
        return _copy_piece(source, target)
    edges = [*range(0, 4 * quarter(size), quarter(size)), size]
    parts = [slice(start, stop) for start, stop in pairwise(edges)]
    return xxh3_64_intdigest(_QUARTERS.pack(*(_copy_piece(source[part], target[part]) for part in parts)))


def quarter(size: int) -> int:
    """In whole pages; the last one has what is left over."""
    return size // 4 // _PAGE * _PAGE


class Staging:
    """Page-aligned buffers of one size, kept for the next time: fresh memory costs a fault per page, which together
    take longer than a copy, and past the caches goes only what is aligned."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Bytes] = []

    def take(self, count: int) -> list[Bytes]:
        """The same ones every time: whoever took them last is done with them."""
        while len(self._buffers) < count:
            room = mmap(-1, max(1, self._num_bytes))
            self._buffers.append(np.frombuffer(room, np.uint8, self._num_bytes))
        return self._buffers[:count]


def address(array: Bytes) -> int:
    """Where it begins. Each way twice as fast as the next one: `from_buffer`, the interface, `.ctypes.data`."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except TypeError:  # read-only
        place: int = array.__array_interface__["data"][0]
        return place


def _copy_piece(source: Bytes, target: Bytes) -> int:
    hasher = xxh3_64()
    for start in range(0, len(source), _PIECE):
        piece = target[start : start + _PIECE]
        piece[:] = source[start : start + _PIECE]
        hasher.update(piece.data)
    return hasher.intdigest()
