"""Memory layout for prompts that several ranks compute together, in a file that they all map.

| area | per | contents |
|---|---|---|
| header | – | one page: magic and shape |
| owner | rank | signal of its helping thread; phase; sequences; whose results count; claims; tokens; earlier KV |
| results | rank, owner | for each unit, the newest phase that is done; residual stream (two), queries, KV, attention |

Each part of it has one writer, apart from claims and signals: a rank that was stopped and continues late writes to
results that no one reads any more. The residual stream is there twice, because a phase that is computed again needs its
input.
`kernels/native/prompt_slabs.h` has the same structures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tripool.errors import ExchangeError
from tripool.experts.layout import LINE_BYTES, PAGE_BYTES, Memory

MAGIC = 0x31_54_50_4D_52_50_52_54
"""b"TRPRMPT1"."""
MAX_UNITS, MAX_PROMPTS = 256, 64
OWNER = np.dtype(
    {
        "names": ["state", "first", "rows", "prompts", "layers", "sequences", "row_winner", "head_winner", "claim"],
        "formats": [
            "<u8", "<u4", "<u4", "<u4", "<u4", ("<i4", (MAX_PROMPTS, 4)), ("u1", (2, MAX_UNITS)), ("u1", MAX_UNITS),
            ("<u8", MAX_UNITS),
        ],
        "offsets": [64, 128, 132, 136, 140, 144, 1168, 1680, 1984],
        "itemsize": 4032,
    }
)  # fmt: skip


def _up(size: int, unit: int = LINE_BYTES) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """Offsets in bytes."""

    ranks: int
    rows: int
    """Of a step at most; a larger one is computed by its own rank alone."""
    context: int
    """Positions before the step's, of all its sequences, at most."""
    hidden: int
    query_width: int
    kv_width: int
    attended_width: int

    @property
    def owners(self) -> int:
        return PAGE_BYTES

    @property
    def tokens(self) -> int:
        """Within an owner's part, as `prior`."""
        return _up(OWNER.itemsize)

    @property
    def prior(self) -> int:
        return _up(self.tokens + 8 * self.rows)

    @property
    def owner_bytes(self) -> int:
        return _up(self.prior + 4 * self.context * self.kv_width, PAGE_BYTES)

    @property
    def areas(self) -> int:
        return self.owners + self.ranks * self.owner_bytes

    # ---- within the results of a rank for an owner ----------------------------------------------------------------

    @property
    def stream(self) -> int:
        return _up(4 * MAX_UNITS)

    @property
    def queries(self) -> int:
        return _up(self.stream + 2 * 4 * self.rows * self.hidden)

    @property
    def kv(self) -> int:
        return _up(self.queries + 4 * self.rows * self.query_width)

    @property
    def attended(self) -> int:
        return _up(self.kv + 4 * self.rows * self.kv_width)

    @property
    def area_bytes(self) -> int:
        return _up(self.attended + 4 * self.rows * self.attended_width, PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.areas + self.ranks**2 * self.area_bytes

    def header(self) -> npt.NDArray[np.uint64]:
        return np.array([MAGIC, *(getattr(self, field.name) for field in fields(self))], np.uint64)

    @classmethod
    def read(cls, memory: Memory) -> PromptLayout:
        """The layout that the header of shared memory describes."""
        names = [field.name for field in fields(cls)]
        magic, *shape = memory[: 8 * (1 + len(names))].view(np.uint64).tolist()
        if magic != MAGIC:
            raise ExchangeError("these are no prompts of this version", hint="start all ranks from one installation")
        layout = cls(**dict(zip(names, shape, strict=True)))
        if layout.num_bytes != len(memory):
            raise ExchangeError("the memory has another size than its header says", hint="restart the instance")
        return layout


def unit_rows(rows: int, ranks: int, unit: int) -> range:
    """Rows of a unit: one large part for each rank, then one small part each, so that ranks end together."""
    large = rows * 3 // 4 // ranks
    rest, small = rows - large * ranks, unit - ranks
    if small < 0:
        return range(large * unit, large * (unit + 1))
    return range(large * ranks + rest * small // ranks, large * ranks + rest * (small + 1) // ranks)
