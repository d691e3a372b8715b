"""Index data of a batch for attention kernels: which rows belong to which sequence, position and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tripool.core import BLOCK_TOKENS


@dataclass(slots=True)
class SequenceRows:
    """Consecutive rows of one sequence. Row `row` + i is at position `start` + i and attends to `first` .. itself."""

    row: int
    count: int
    start: int
    block_table: list[int]
    """Blocks of positions 0 .. stop - 1, in order."""
    first: int = 0
    """First visible position: 1 for the MTP layer, whose KV is stored shifted by one."""

    blocks: torch.Tensor | None = field(init=False)
    """`block_table` as int64, or None if its blocks are contiguous: then the context needs no copy."""

    def __post_init__(self) -> None:
        consecutive = self.block_table == list(range(self.block_table[0], self.block_table[0] + len(self.block_table)))
        self.blocks = None if consecutive else torch.tensor(self.block_table)

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


def context(kv: torch.Tensor, seq: SequenceRows) -> torch.Tensor:
    """KV rows of positions first .. stop - 1 of a sequence, [tokens, width]: a view of kv [slots, width], or a copy."""
    if seq.blocks is None:
        begin = seq.block_table[0] * BLOCK_TOKENS
        return kv[begin + seq.first : begin + seq.stop]
    width = kv.shape[1]
    blocks = kv.view(-1, BLOCK_TOKENS * width).index_select(0, seq.blocks)
    return blocks.view(-1, width)[seq.first : seq.stop]


def visible(seq: SequenceRows) -> torch.Tensor:
    """bool [count, tokens]: causal mask over the context."""
    positions = torch.arange(seq.first, seq.stop)
    rows = torch.arange(seq.start, seq.stop)
    return positions[None, :] <= rows[:, None]
