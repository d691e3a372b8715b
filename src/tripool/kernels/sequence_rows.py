"""Where the rows of a batch sit: the index data that attention kernels take beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tripool.core import BLOCK_TOKENS


@dataclass(slots=True)
class SequenceRows:
    """Consecutive rows of one sequence. Row `row` + i is position `start` + i and sees `first` .. itself."""

    row: int
    count: int
    start: int
    table: list[int]
    """The blocks that hold positions 0 .. stop - 1, in order."""
    first: int = 0
    """First visible position: 1 for the MTP layer, whose KV is stored shifted by one."""

    blocks: torch.Tensor | None = field(init=False)
    """`table` as int64, or None when its blocks follow one another: then the context needs no copy."""

    def __post_init__(self) -> None:
        consecutive = self.table == list(range(self.table[0], self.table[0] + len(self.table)))
        self.blocks = None if consecutive else torch.tensor(self.table)

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


def context(kv: torch.Tensor, seq: SequenceRows) -> torch.Tensor:
    """KV rows of positions first .. stop - 1 of a span, [tokens, width]: a view of kv [slots, width], or a copy."""
    if seq.blocks is None:
        begin = seq.table[0] * BLOCK_TOKENS
        return kv[begin + seq.first : begin + seq.stop]
    width = kv.shape[1]
    blocks = kv.view(-1, BLOCK_TOKENS * width).index_select(0, seq.blocks)
    return blocks.view(-1, width)[seq.first : seq.stop]


def visible(seq: SequenceRows) -> torch.Tensor:
    """bool [count, tokens]: which of the context's rows each row of the span may see."""
    positions = torch.arange(seq.first, seq.stop)
    rows = torch.arange(seq.start, seq.stop)
    return positions[None, :] <= rows[:, None]
