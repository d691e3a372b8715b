"""Copies a block and says the checksum of the copy: by compiled code where it is there, else by numpy, to the same bit.

The checksum is an XXH3; of a large block it is the XXH3 of those of its quarters, which are copied side by side. The
compiled version is a single pass past the caches. Both let go of the interpreter while they work.
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
_PAGE = 4096
_PIECE = 2**19
"""Copied, then hashed while it is still in the core's own cache."""
_QUARTERS = struct.Struct("<4Q")


@cache
def library() -> ctypes.CDLL | None:
    """None where it was not compiled, or for another machine."""
    try:
        loaded = ctypes.CDLL(str(FILE))
    except OSError:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    loaded.tripool_copy.argtypes, loaded.tripool_copy.restype = (pointer, pointer, size, size, pointer), None
    loaded.tripool_copy_soon.restype = None
    loaded.tripool_copy_by.argtypes = (ctypes.c_int, pointer, pointer, size, size, pointer)
    return loaded


def soon() -> None:
    """Large blocks are about to be copied: whoever helps with that had better wake up now."""
    compiled = library()
    if compiled is not None:
        compiled.tripool_copy_soon()


def copy(source: Bytes, target: Bytes) -> int:
    """Contiguous, and of one length."""
    size = len(source)
    assert size == len(target)
    compiled = library() if size >= _LARGE else None
    if compiled is None:
        return plain_copy(source, target)
    hashes = (ctypes.c_uint64 * 4)()
    compiled.tripool_copy(source.ctypes.data, target.ctypes.data, _quarter(size), size, hashes)
    return xxh3_64_intdigest(_QUARTERS.pack(*hashes))


def plain_copy(source: Bytes, target: Bytes) -> int:
    size = len(source)
    if size < _LARGE:
        return _copy_piece(source, target)
    edges = [*range(0, 4 * _quarter(size), _quarter(size)), size]
    parts = [slice(start, stop) for start, stop in pairwise(edges)]
    return xxh3_64_intdigest(_QUARTERS.pack(*(_copy_piece(source[part], target[part]) for part in parts)))


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


def _quarter(size: int) -> int:
    """In whole pages; the last one has what is left over."""
    return size // 4 // _PAGE * _PAGE


def _copy_piece(source: Bytes, target: Bytes) -> int:
    hasher = xxh3_64()
    for start in range(0, len(source), _PIECE):
        piece = target[start : start + _PIECE]
        piece[:] = source[start : start + _PIECE]
        hasher.update(piece.data)
    return hasher.intdigest()
