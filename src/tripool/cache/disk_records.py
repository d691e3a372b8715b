"""Records of the disk tier: one block on disk, one write, one segment, one purge. Plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.cache.records import StoredBlock

PAGE = 4096
"""Alignment of everything on disk. A header takes one page, in front of every segment and every block."""


def footprint(num_bytes: int) -> int:
    """Bytes that a block of `num_bytes` takes on disk: one header page plus whole pages."""
    return PAGE - (-num_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class DiskCopy(StoredBlock):
    """One block on disk. `number` rises with every copy; `generation` is that of its segment when it was written."""

    number: int
    segment: int
    offset: int
    generation: int

    @property
    def end(self) -> int:
        return self.offset + footprint(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Write:
    """Write the contents of a slot. The slot may be reused at any moment, so the copy must be compared with the
    checksum.
    """

    slot: int
    copy: DiskCopy


@dataclass(frozen=True, slots=True)
class Segment:
    """What a scan found in a segment after a restart. Generation 0: nothing."""

    generation: int = 0
    disk_copies: tuple[DiskCopy, ...] = ()
    end: int = PAGE
    """Offset at which writing may continue."""


@dataclass(frozen=True, slots=True)
class Purge:
    """Voids all copies of a namespace with smaller numbers, those still being written included."""

    namespace: bytes
    before: int


@dataclass(slots=True)
class DiskCounters:
    """Counts of blocks since the member started."""

    written: int = 0
    lost: int = 0
    """Evicted from memory before they were written."""
    forgotten: int = 0
    """Evicted from disk to make room."""
    promoted: int = 0
    bad: int = 0
    """Read back with a wrong checksum: damaged or torn."""
