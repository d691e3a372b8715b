"""Memory-mapped files: never copied whole, pages released after use. Independent of formats."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tripool.checkpoints.inside import open_inside
from tripool.errors import CheckpointError, CheckpointTruncated

PIECE_BYTES = 4 * 2**20
"""Bytes processed at a time: bounds temporaries and resident pages for tensors of any size."""


class MappedFile:
    """Copy-on-write mapping, so that torch accepts it as writable memory while nothing can reach the file.

    No swap is reserved for it: a file may be larger than the machine's memory.
    """

    def __init__(self, path: Path, *, anywhere: bool = False) -> None:
        """`anywhere`: see `open_inside`."""
        self.path = path
        self._map: mmap.mmap | None = None
        hint = "check the name; a checkpoint must have every file that it names"
        file = open_inside(path, anywhere=anywhere, hint=hint)
        try:
            self.num_bytes = os.fstat(file).st_size
            if self.num_bytes == 0:
                raise CheckpointTruncated("the file is empty", hint="fetch it again", file=path)
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # macOS overcommits anyway
            self._map = mmap.mmap(file, self.num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            hint = "check that it is on a disk that can be mapped"
            raise CheckpointError(f"cannot be mapped: {error.strerror}", hint=hint, file=path) from error
        finally:
            os.close(file)

    def view(self, start: int, stop: int) -> memoryview:
        assert self._map is not None, "used after close"
        assert 0 <= start <= stop <= self.num_bytes
        return memoryview(self._map)[start:stop]

    def tensor(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D view of the bytes; a copy where they are not aligned for `dtype`."""
        if start == stop:
            return torch.empty(0, dtype=dtype)
        # Through a memoryview: the tensor then keeps the mapping alive, which the bare map would not do.
        if start % dtype.itemsize == 0:
            return torch.frombuffer(self.view(start, stop), dtype=dtype)
        return torch.frombuffer(self.view(start, stop), dtype=torch.uint8).clone().view(dtype)

    def drop(self, start: int, stop: int) -> None:
        """Release the pages. They are read from the file again when touched, so views stay valid."""
        assert self._map is not None, "used after close"
        start -= start % mmap.PAGESIZE
        if start < stop:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Views stay valid: the mapping ends with the last of them."""
        self._map = None


def row_pieces(num_rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about PIECE_BYTES, each (but the last) a multiple of `multiple` rows."""
    step = max(PIECE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
