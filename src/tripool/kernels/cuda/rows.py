"""The batch as the device reads it: block tables and seq_lens in tensors instead of lists.

Decode rows come as `queries` rows per request; prompt rows as one index of all sequences (`PromptIndex`) for kernels
that read pages, as the slots of all their contexts (`PromptContexts`) for those that read gathered rows, or in groups
of equal shape for torch's kernel; each form is built when it is first needed. A captured step has decode rows only,
whose tensors keep their addresses while their values change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.batch import Batch
from tripool.kernels.sequence_rows import SequenceRows

MAX_QUERIES = 2
"""Query tokens of one request that share one read of its context: the newest token and a draft."""
MOST_GATHERED = 1 << 16
"""Tokens of the contexts that are gathered at once, unless one sequence has more: bounds the memory of a step in which
many short prompts have long prefixes in the cache."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    block_table: torch.Tensor
    """int32 [requests, width]: blocks of each request; entries beyond its length are valid block numbers."""
    seq_lens: torch.Tensor
    """int32 [requests]: tokens in the context, the query tokens included."""
    queries: int
    first: int = 0
    """First visible position."""

    @property
    def seen(self) -> torch.Tensor:
        """bool [requests, queries, tokens]: query i of Q sees `seq_lens - Q + 1 + i` tokens, except those
        before `first`.
        """
        device = self.seq_lens.device
        positions = torch.arange(self.block_table.shape[1] * BLOCK_TOKENS, device=device)
        ends = self.seq_lens[:, None] - self.queries + 1 + torch.arange(self.queries, device=device)
        return (positions < ends[..., None]) & (positions >= self.first)

    def by_row(self) -> PagedRows:
        """Every query as a request of its own."""
        if self.queries == 1:
            return self
        offsets = torch.arange(1 - self.queries, 1, dtype=torch.int32, device=self.seq_lens.device)
        table = self.block_table[:, None].expand(-1, self.queries, -1).flatten(0, 1)
        return PagedRows(table, (self.seq_lens[:, None] + offsets).flatten(), 1, self.first)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Sequences with equal start and count, stacked."""

    rows: torch.Tensor
    """int64 [requests * count], among the prompt rows."""
    block_table: torch.Tensor
    """int64 [requests, blocks]."""
    start: int
    count: int
    first: int

    @property
    def is_whole(self) -> bool:
        """Whether the context consists of these rows only: then a plain causal mask is right."""
        return self.start == self.first

    def seen(self) -> torch.Tensor:
        """bool [count, tokens]."""
        stop = self.start + self.count
        positions = torch.arange(self.first, stop, device=self.rows.device)
        return positions <= torch.arange(self.start, stop, device=self.rows.device)[:, None]


@dataclass(frozen=True, slots=True)
class PromptIndex:
    """All sequences in prompt form, in the order of their rows."""

    index: torch.Tensor
    """int32 [sequences, 4 + width]: first row, number of rows, position of the first row, first visible position, and
    the sequence's blocks."""
    has_first: bool
    """Whether the first visible position of any is above 0."""


@dataclass(frozen=True, slots=True)
class PromptContexts:
    """Some consecutive sequences in prompt form, for kernels that read gathered contexts."""

    rows: slice
    """Among the prompt rows."""
    slots: torch.Tensor
    """int32 [tokens]: visible slots of all contexts, one sequence after the other."""
    index: torch.Tensor
    """int32 [sequences, 4]: first row within `rows`, number of rows, visible tokens before the first row, and the
    context's first token in `slots`."""


@dataclass(slots=True)
class DeviceRows:
    """A batch's sequences in this form; stored in `Batch.native`."""

    seqs: Sequence[SequenceRows]
    """In prompt form, on the host."""
    decodes: PagedRows | None
    order: torch.Tensor
    """int64 [rows]: 0, 1, 2 … (the index of each row in tensors gathered by row, such as `cos_sin`)."""
    _prompts: tuple[PromptGroup, ...] | None = None
    _index: PromptIndex | None = None
    _contexts: tuple[PromptContexts, ...] | None = None

    def separate_queries(self) -> DeviceRows:
        """With one query per request in decode form: kernels that see two at once may cut the context otherwise."""
        if self.decodes is not None:
            self.decodes = self.decodes.by_row()
        return self

    @property
    def prompts(self) -> tuple[PromptGroup, ...]:
        if self._prompts is None:
            self._prompts = _groups(self.seqs, self.order.device)
        return self._prompts

    @property
    def prompt_index(self) -> PromptIndex:
        if self._index is None:
            self._index = _index(self.seqs, self.order.device)
        return self._index

    @property
    def prompt_contexts(self) -> tuple[PromptContexts, ...]:
        if self._contexts is None:
            self._contexts = _contexts(self.seqs, self.order.device)
        return self._contexts


def device_rows(batch: Batch) -> DeviceRows:
    if batch.native is None:
        device = batch.tokens.device
        decodes = _paged(batch.decodes, device) if batch.decodes else None
        batch.native = DeviceRows(batch.prompts, decodes, torch.arange(batch.num_rows, device=device))
    assert isinstance(batch.native, DeviceRows)
    return batch.native


def to_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Numbers as a tensor there, without waiting for the device."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def context(kv: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """kv [slots, width] at the blocks of block_table [requests, blocks] -> [requests, tokens, width], a copy."""
    blocks = kv.view(-1, BLOCK_TOKENS * kv.shape[1])
    return blocks.index_select(0, block_table.flatten()).view(len(block_table), -1, kv.shape[1])


def _groups(seqs: Sequence[SequenceRows], device: torch.device) -> tuple[PromptGroup, ...]:
    alike: dict[tuple[int, int, int], list[SequenceRows]] = {}
    for seq in seqs:
        alike.setdefault((seq.start, seq.count, seq.first), []).append(seq)
    groups = []
    for (start, count, first), everyone in alike.items():
        most = max(1, MOST_GATHERED // (start + count))
        for members in (everyone[i : i + most] for i in range(0, len(everyone), most)):
            rows = [row for seq in members for row in range(seq.row, seq.row + count)]
            block_table = to_device([seq.block_table for seq in members], device)
            groups.append(PromptGroup(to_device(rows, device), block_table, start, count, first))
    return tuple(groups)


def _index(seqs: Sequence[SequenceRows], device: torch.device) -> PromptIndex:
    index = np.zeros((len(seqs), 4 + max(len(seq.block_table) for seq in seqs)), np.int32)
    for line, seq in zip(index, seqs, strict=True):
        line[:4] = seq.row, seq.count, seq.start, seq.first
        line[4 : 4 + len(seq.block_table)] = seq.block_table
    return PromptIndex(to_device(index, device, torch.int32), any(seq.first for seq in seqs))


def _contexts(seqs: Sequence[SequenceRows], device: torch.device) -> tuple[PromptContexts, ...]:
    """In one upload: all slots, then the lines of the index."""
    offsets = np.arange(BLOCK_TOKENS, dtype=np.int32)
    slots: list[np.ndarray] = []
    lines: list[tuple[int, int, int, int]] = []
    parts: list[tuple[int, int]] = []  # first sequence, first row
    tokens = 0
    for seq in seqs:
        visible = seq.stop - seq.first
        if not parts or tokens + visible > MOST_GATHERED:
            parts.append((len(lines), seq.row))
            tokens = 0
        blocks = np.asarray(seq.block_table, np.int32)[: -(-seq.stop // BLOCK_TOKENS)]
        slots.append((blocks[:, None] * BLOCK_TOKENS + offsets).ravel()[seq.first : seq.stop])
        lines.append((seq.row - parts[-1][1], seq.count, seq.start - seq.first, tokens))
        tokens += visible
    index, begins = np.asarray(lines, np.int32), np.cumsum([0, *map(len, slots)]).tolist()
    uploaded = to_device(np.concatenate((index.ravel(), *slots)), device, torch.int32)
    on_device = uploaded[: index.size].view(-1, 4)
    bounds = [part[0] for part in parts] + [len(lines)]
    return tuple(
        PromptContexts(
            slice(row, seqs[stop - 1].row + seqs[stop - 1].count),
            uploaded[index.size + begins[begin] : index.size + begins[stop]],
            on_device[begin:stop],
        )
        for (begin, row), stop in zip(parts, bounds[1:], strict=True)
    )


def _paged(seqs: Sequence[SequenceRows], device: torch.device) -> PagedRows:
    """One request per sequence if all have the same few rows, else one request per row."""
    queries, first = seqs[0].count, seqs[0].first
    if queries > MAX_QUERIES or any(seq.count != queries for seq in seqs):
        queries = 1
    width = max(len(seq.block_table) for seq in seqs)
    tables, seq_lens = [], []
    for seq in seqs:
        for stop in range(seq.start + queries, seq.stop + 1, queries):
            tables.append(seq.block_table + seq.block_table[:1] * (width - len(seq.block_table)))
            seq_lens.append(stop)
    block_table = to_device(tables, device, torch.int32)
    return PagedRows(block_table, to_device(seq_lens, device, torch.int32), queries, first)
