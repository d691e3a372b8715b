"""A file as memory: mapped, never copied whole, pages given back after use. Knows nothing of formats."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from tripool.errors import CheckpointError, CheckpointMissing, CheckpointTruncated

PIECE_BYTES = 4 * 2**20
"""Work on this much at a time: temporaries and resident pages stay this small however large a tensor is."""


class MappedFile:
    """Copy-on-write mapping, so that torch accepts it as writable memory while nothing can reach the file.

    No swap is reserved for it: a file may be larger than the machine's memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as file:
                self.num_bytes = file.seek(0, 2)
                if self.num_bytes == 0:
                    raise CheckpointTruncated("the file is empty", hint="fetch it again", file=path)
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)  # macOS overcommits anyway
                self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except FileNotFoundError as error:
            hint = "check the name; a checkpoint must have every file that it names"
            raise CheckpointMissing("no such file", hint=hint, file=path) from error
        except OSError as error:
            hint = "check that it is a file and that you may read it"
            raise CheckpointError(f"cannot be opened: {error.strerror}", hint=hint, file=path) from error

    def view(self, start: int, stop: int) -> memoryview:
        assert self._map is not None, "used after close"
        assert 0 <= start <= stop <= self.num_bytes
        return memoryview(self._map)[start:stop]

    def tensor(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D view of the bytes; a copy where they are not aligned for `dtype`."""
        if start == stop:
            return torch.empty(0, dtype=dtype)
        # Through a memoryview: the tensor then pins the mapping, which the bare map would not do.
        if start % dtype.itemsize == 0:
            return torch.frombuffer(self.view(start, stop), dtype=dtype)
        return torch.frombuffer(self.view(start, stop), dtype=torch.uint8).clone().view(dtype)

    def drop(self, start: int, stop: int) -> None:
        """Give the pages back. They come again from the file when touched, so views stay valid."""
        assert self._map is not None, "used after close"
        start -= start % mmap.PAGESIZE
        if start < stop:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Views outlive it: the mapping goes with the last of them."""
        self._map = None


def row_pieces(num_rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about PIECE_BYTES, each (but the last) a multiple of `multiple` rows."""
    step = max(PIECE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)
