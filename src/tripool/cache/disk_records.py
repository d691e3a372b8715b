"""What the disk tier knows of one block, and what it answers: plain data, no rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 4096
"""Everything on disk begins at a multiple of it: a header is one, in front of every segment and of every block."""


def footprint(num_bytes: int) -> int:
    """Bytes on disk of a block of so many: its header, and whole pages."""
    return PAGE - (-num_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class DiskCopy:
    """One block on disk. `number` is above that of every earlier copy; `generation` is that of its segment's life."""

    key: bytes
    namespace: bytes
    position: int
    checksum: int
    num_bytes: int
    form: int
    number: int
    segment: int
    offset: int
    generation: int

    @property
    def end(self) -> int:
        return self.offset + footprint(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Write:
    """Copy what is in this slot. It may be reused at any moment: compare what was copied with the checksum."""

    slot: int
    copy: DiskCopy


@dataclass(frozen=True, slots=True)
class Segment:
    """What was found of a segment after a restart. Generation 0: nothing."""

    generation: int = 0
    disk_copies: tuple[DiskCopy, ...] = ()
    end: int = PAGE
    """Where writing may go on."""


@dataclass(frozen=True, slots=True)
class Purge:
    """Copies of this namespace with smaller numbers are void, also those that are still being written."""

    namespace: bytes
    before: int


@dataclass(slots=True)
class DiskCounters:
    """Since the member started, in blocks."""

    written: int = 0
    lost: int = 0
    """Forgotten by memory before they could be written."""
    forgotten: int = 0
    """To make room on disk."""
    promoted: int = 0
    bad: int = 0
    """Not what they were when they were written: damaged, or torn."""
