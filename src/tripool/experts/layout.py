"""Memory layout of an exchange: where the doorbells and slabs of an instance's ranks lie in their shared memory.

| area | per | contents |
|---|---|---|
| header | – | one page: magic and shape; in its second line, how many replicas were copied to balance loads |
| control | rank | three lines: fence epoch, whose signal (0: its own); expert thread's signal; waiting owner's signal |
| dispatch doorbells | destination, source, lane | one line: {epoch, count, sequence} of the newest request |
| combine doorbells | source, destination, lane | one line: the same word, once the request is answered |
| routed rows | source | for each layer and expert, the rows that the source has routed to it so far |
| assigned rows | layer | for each rank, the rows that all sources have sent to it so far: they choose replicas by it |
| dispatch slabs | source, lane | layer, segment of each destination, entries, rows in 8 bits |
| combine slabs | destination, source, lane | one float32 row per entry |

A rank of another host has no threads here: its signal is that of the thread which forwards to its host (`forward.py`).
A lane is the parity of the original design: each source has two, so that one exchange can be prepared while the answers
of the other are read. Every line and every slab has exactly one writer, except signals and assigned rows, which are
only hints: a rank that was stopped and continues late can write only to memory of its own, and its doorbells carry an
old epoch or sequence. There is one doorbell per pair of ranks, not one per source, because a destination answers each
source on its own.

A doorbell is stored with release after the payload and never cleared. An answer returns the credit to reuse the slab: a
source writes a lane again only when all its requests in it are answered or given up, and a destination writes its
combine slab again only when a newer request of that lane arrives.

An entry is one (row, choice). The entries of one destination are consecutive, sorted by expert, and form its segment.
The answer to entry j is row j of the destination's combine slab: requests that are sent again never overwrite answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tripool.errors import ExchangeError

LINE_BYTES = 64
PAGE_BYTES = 4096
GROUP = 64
"""Values of a row that share a scale: as the 8-bit kernels have it (`kernels/native/product.h`)."""
LANES = 2
MAGIC = 0x33_48_43_58_45_50_52_54
"""b"TRPEXCH3"."""
SLAB_HEAD = np.dtype([("layer", "<u4"), ("rows", "<u4")])
SEGMENT = np.dtype([("offset", "<u4"), ("count", "<u4")])
ENTRY = np.dtype([("row", "<u4"), ("choice", "<u4"), ("expert", "<u4"), ("weight", "<f4")])
_MAX_ENTRIES = 2**16 - 1
_MAX_RANKS = 1024

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Bell:
    """The contents of a doorbell. One 64-bit word: it is never read half-written."""

    epoch: int
    count: int
    sequence: int

    def pack(self) -> int:
        return (self.epoch & 0xFFFF) << 48 | self.count << 32 | self.sequence & 0xFFFFFFFF

    @classmethod
    def unpack(cls, word: int) -> Bell:
        return cls(word >> 48, word >> 32 & 0xFFFF, word & 0xFFFFFFFF)


def older(epoch: int, than: int) -> bool:
    """Epochs are compared in 16 bits, as doorbells carry them."""
    return (epoch - than) & 0xFFFF >= 0x8000


def _up(size: int, unit: int = LINE_BYTES) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets in bytes. `layers` counts the layers with experts, `experts` those of one layer."""

    ranks: int
    layers: int
    experts: int
    top_k: int
    hidden: int
    slab_rows: int
    """Rows of one exchange; a larger batch takes several."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.layers, self.experts, self.top_k, self.hidden, self.slab_rows) < 1:
            raise ExchangeError("an exchange of nothing", hint="every size must be at least 1")
        if self.entries > _MAX_ENTRIES or self.ranks > _MAX_RANKS:
            hint = f"at most {_MAX_ENTRIES} rows x choices and {_MAX_RANKS} ranks; take fewer slab_rows"
            raise ExchangeError(f"{self.entries} entries for {self.ranks} ranks are too many", hint=hint)

    @property
    def entries(self) -> int:
        return self.slab_rows * self.top_k

    @property
    def groups(self) -> int:
        return -(-self.hidden // GROUP)

    # ---- areas ----------------------------------------------------------------------------------------------------

    @property
    def control(self) -> int:
        return PAGE_BYTES

    @property
    def dispatch_bells(self) -> int:
        return self.control + 3 * LINE_BYTES * self.ranks

    @property
    def combine_bells(self) -> int:
        return self.dispatch_bells + LINE_BYTES * LANES * self.ranks**2

    @property
    def routed(self) -> int:
        return self.combine_bells + LINE_BYTES * LANES * self.ranks**2

    @property
    def routed_bytes(self) -> int:
        return _up(8 * self.layers * self.experts)

    @property
    def assigned(self) -> int:
        return self.routed + self.routed_bytes * self.ranks

    @property
    def assigned_bytes(self) -> int:
        return _up(8 * self.ranks)

    @property
    def dispatch(self) -> int:
        return _up(self.assigned + self.assigned_bytes * self.layers, PAGE_BYTES)

    @property
    def combine(self) -> int:
        return self.dispatch + LANES * self.ranks * self.dispatch_bytes

    @property
    def num_bytes(self) -> int:
        return self.combine + LANES * self.ranks**2 * self.combine_bytes

    # ---- within a dispatch slab -----------------------------------------------------------------------------------

    @property
    def segment_list(self) -> int:
        return LINE_BYTES

    @property
    def entry_list(self) -> int:
        return _up(self.segment_list + SEGMENT.itemsize * self.ranks)

    @property
    def scales(self) -> int:
        return _up(self.entry_list + ENTRY.itemsize * self.entries)

    @property
    def fixes(self) -> int:
        return _up(self.scales + 4 * self.groups * self.slab_rows)

    @property
    def values(self) -> int:
        return _up(self.fixes + 4 * self.groups * self.slab_rows)

    @property
    def dispatch_bytes(self) -> int:
        return _up(self.values + GROUP * self.groups * self.slab_rows, PAGE_BYTES)

    @property
    def combine_bytes(self) -> int:
        return _up(4 * self.hidden * self.entries, PAGE_BYTES)

    # ---- the header -----------------------------------------------------------------------------------------------

    def header(self) -> npt.NDArray[np.uint64]:
        shape = (self.ranks, self.layers, self.experts, self.top_k, self.hidden, self.slab_rows)
        return np.array([MAGIC, *shape], np.uint64)

    @classmethod
    def read(cls, memory: Memory) -> Layout:
        """The layout that the header of shared memory describes."""
        magic, *shape = memory[: 7 * 8].view(np.uint64).tolist()
        names = ("ranks", "layers", "experts", "top_k", "hidden", "slab_rows")
        if magic != MAGIC:
            raise ExchangeError("this is no exchange of this version", hint="start all ranks from one installation")
        layout = cls(**dict(zip(names, shape, strict=True)))
        if layout.num_bytes != len(memory):
            raise ExchangeError("the exchange has another size than its header says", hint="restart the instance")
        return layout
