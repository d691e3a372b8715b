"""One step's rows as the device sees them: block tables and lengths in tensors instead of lists.

Decode rows come as `queries` rows for each request; prompt rows in groups of equal shape, each one call of the fused
kernel. A captured step has decode rows only, whose tensors keep their places while their values change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.batch import Batch
from tripool.kernels.sequence_rows import SequenceRows

MAX_QUERIES = 2
"""Query tokens of one request that share a read of its context: the newest token and a draft."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    table: torch.Tensor
    """int32 [requests, width]: blocks of each request; what lies beyond its length is a block that exists."""
    lengths: torch.Tensor
    """int32 [requests]: tokens in the context, the query tokens included."""
    queries: int
    first: int = 0
    """First visible position."""

    @property
    def seen(self) -> torch.Tensor:
        """bool [requests, queries, tokens]: query i of Q sees `lengths - Q + 1 + i` tokens, less the hidden first."""
        device = self.lengths.device
        positions = torch.arange(self.table.shape[1] * BLOCK_TOKENS, device=device)
        ends = self.lengths[:, None] - self.queries + 1 + torch.arange(self.queries, device=device)
        return (positions < ends[..., None]) & (positions >= self.first)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Spans of one start and one length, stacked."""

    rows: torch.Tensor
    """int64 [requests * count], among the prompt rows."""
    table: torch.Tensor
    """int64 [requests, blocks]."""
    start: int
    count: int
    first: int

    @property
    def is_whole(self) -> bool:
        """Whether the context is these rows and nothing else: then a plain causal mask is right."""
        return self.start == self.first

    def seen(self) -> torch.Tensor:
        """bool [count, tokens]."""
        stop = self.start + self.count
        positions = torch.arange(self.first, stop, device=self.rows.device)
        return positions <= torch.arange(self.start, stop, device=self.rows.device)[:, None]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A batch's spans in this form; stands in `Batch.native`."""

    prompts: tuple[PromptGroup, ...]
    decodes: PagedRows | None
    order: torch.Tensor
    """int64 [rows]: 0, 1, 2 … (each row's place in what was gathered by row, such as turns)."""


def device_rows(batch: Batch) -> DeviceRows:
    if batch.native is None:
        device = batch.tokens.device
        decodes = _paged(batch.decodes, device) if batch.decodes else None
        batch.native = DeviceRows(_groups(batch.prompts, device), decodes, torch.arange(batch.num_rows, device=device))
    assert isinstance(batch.native, DeviceRows)
    return batch.native


def context(kv: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """kv [slots, width] at the blocks of table [requests, blocks] -> [requests, tokens, width], a copy."""
    blocks = kv.view(-1, BLOCK_TOKENS * kv.shape[1])
    return blocks.index_select(0, table.flatten()).view(len(table), -1, kv.shape[1])


def _groups(seqs: Sequence[SequenceRows], device: torch.device) -> tuple[PromptGroup, ...]:
    alike: dict[tuple[int, int, int], list[SequenceRows]] = {}
    for seq in seqs:
        alike.setdefault((seq.start, seq.count, seq.first), []).append(seq)
    groups = []
    for (start, count, first), members in alike.items():
        rows = torch.tensor([seq.row for seq in members])[:, None] + torch.arange(count)
        table = torch.tensor([seq.table for seq in members])
        groups.append(PromptGroup(rows.flatten().to(device), table.to(device), start, count, first))
    return tuple(groups)


def _paged(seqs: Sequence[SequenceRows], device: torch.device) -> PagedRows:
    """Requests of as many queries as they have rows where all have the same few; else each row by itself."""
    queries, first = seqs[0].count, seqs[0].first
    if queries > MAX_QUERIES or any(seq.count != queries for seq in seqs):
        queries = 1
    width = max(len(seq.table) for seq in seqs)
    tables, lengths = [], []
    for seq in seqs:
        for stop in range(seq.start + queries, seq.stop + 1, queries):
            tables.append(seq.table + seq.table[:1] * (width - len(seq.table)))
            lengths.append(stop)
    table = torch.tensor(tables, dtype=torch.int32).to(device)
    return PagedRows(table, torch.tensor(lengths, dtype=torch.int32).to(device), queries, first)
