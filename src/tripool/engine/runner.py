"""Runs the network over pieces of work and holds the paged KV memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.sequence_rows import SequenceRows
from tripool.kernels.table import Draw
from tripool.models import Batch, Model
from tripool.sequence import Work

__all__ = ["Runner", "Work"]


class Runner:
    def __init__(self, model: Model, *, num_blocks: int, mtp: bool = False) -> None:
        assert not mtp or model.mtp is not None
        self.model = model
        layers = model.kv_layers if mtp else model.arch.layers
        self.kv = self._memory(layers, num_blocks, model.arch.kv_width)
        self._mtp_kv = self.kv[-1]
        self.kv_bytes, self.block_bytes = self.kv.nbytes, self.kv[:, :BLOCK_TOKENS].nbytes
        """Of all blocks, and of one, in all layers."""

    def _memory(self, layers: int, num_blocks: int, width: int) -> torch.Tensor:
        return _zeros(layers, num_blocks * BLOCK_TOKENS, width)

    def export_block(self, block: int, into: memoryview) -> None:
        """Copy one block's KV, layer after layer, into `block_bytes` writable bytes."""
        self._as_block(into).copy_(self._slots(block))

    def import_block(self, block: int, data: memoryview) -> None:
        self._slots(block).copy_(self._as_block(data))

    def _slots(self, block: int) -> torch.Tensor:
        return self.kv[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]

    def _as_block(self, data: memoryview) -> torch.Tensor:
        return torch.frombuffer(data, dtype=self.kv.dtype).view(len(self.kv), BLOCK_TOKENS, -1)

    def warm(self, max_running: int, step_tokens: int, progress: Callable[[str], None] | None = None) -> None:
        """Do now what is slow the first time, such as compiling kernels. On a CPU nothing is."""

    @torch.inference_mode()
    def hidden(self, work: Sequence[Work]) -> torch.Tensor:
        """Final hidden states of all rows, in the order of `work`. Writes their KV."""
        if self.model.stack is not None:
            return self.step(work, (), ())[0]
        batch, order = batch_of(work)
        hidden = self.model.hidden(batch, self.kv)
        return hidden if order is None else hidden.index_select(0, order)

    def step(self, work: Sequence[Work], rows: Sequence[int], draws: Sequence[Draw]) -> tuple[torch.Tensor, list[int]]:
        """As `hidden`, and what these draws choose from the `logits` of these rows, in one call."""
        assert self.model.stack is not None
        ordered = sorted(work, key=_form) if len(work) > 1 else work
        order = None if _same(ordered, work) else _rows_of(work, ordered)
        rows = rows if order is None else [order[row] for row in rows]
        hidden, tokens = self.model.stack.step(ordered, self.kv, rows, draws)
        return hidden if order is None else hidden[order], tokens

    def step_and_guess(self, work: Work, draws: Sequence[Draw]) -> tuple[list[int], int]:
        """One decoding sequence from its newest token, perhaps with a draft after it, to the next draft, in one call:
        see `StackOp.step_and_guess`."""
        assert self.model.stack is not None and self.model.mtp is not None
        return self.model.stack.step_and_guess(work, self.kv, draws, self.model.mtp.draft)

    @torch.inference_mode()
    def mtp_hidden(self, work: Sequence[Work], hidden: torch.Tensor) -> torch.Tensor:
        """The MTP layer over work whose tokens are the successors of the rows of `hidden`."""
        batch, order = batch_of(work, first=1)
        if order is None:
            return self.model.mtp_hidden(batch, hidden, self.kv)
        return self.model.mtp_hidden(batch, hidden[torch.argsort(order)], self.kv).index_select(0, order)

    @torch.inference_mode()
    def draft_logits(self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """As `mtp_hidden`, and then the logits of these rows, in their order."""
        batch, order = batch_of(work, first=1)
        if order is None:
            return self.model.draft_logits(batch, hidden, self.kv, rows)
        places = order[list(rows)]
        logits = self.model.draft_logits(batch, hidden[torch.argsort(order)], self.kv, sorted(places.tolist()))
        return logits[torch.argsort(torch.argsort(places))]

    def draft_tokens(
        self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> list[int] | None:
        """What these draws choose from `draft_logits`, in one call; None, and nothing done, for work in another order
        than the call takes."""
        assert self.model.mtp is not None and self.model.mtp.choosing is not None
        if not _same(sorted(work, key=_form), work):
            return None
        return self.model.mtp.choosing.choose(work, hidden, self._mtp_kv, rows, draws)

    def clear_mtp(self, table: Sequence[int], position: int) -> None:
        """Zero a slot of the MTP layer that cannot be computed: it may hold KV of another sequence."""
        self.kv[self.model.arch.layers, table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS] = 0.0

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


def _zeros(*shape: int) -> torch.Tensor:
    """Anonymous pages, which the kernel zeroes when they are first used. `torch.zeros` writes every byte, which for
    gigabytes of KV takes longer than the rest of a start from the weight cache."""
    num_bytes = torch.float32.itemsize * math.prod(shape)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memoryview(pages), dtype=torch.float32).view(shape)


def rows_of(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows of x: x itself if they are all rows, a view if they are consecutive, which costs a tenth of a copy."""
    first, count = rows[0], len(rows)
    if count == len(x) and list(rows) == list(range(count)):
        return x
    consecutive = count == 1 or (rows[-1] - first + 1 == count and list(rows) == list(range(first, first + count)))
    return x[first : first + count] if consecutive else x[list(rows)]


def batch_of(work: Sequence[Work], *, first: int = 0) -> tuple[Batch, torch.Tensor | None]:
    """Rows in prompt form first. Also the new index of each given row; None if the order did not change."""
    ordered = sorted(work, key=_form)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prompts: list[SequenceRows] = []
    decodes: list[SequenceRows] = []
    for piece in ordered:
        seqs = decodes if piece.decode else prompts
        row = seqs[-1].row + seqs[-1].count if seqs else 0
        table = piece.table[: -(-piece.stop // BLOCK_TOKENS)]
        seqs.append(SequenceRows(row, len(piece.tokens), piece.start, table, first))
        tokens += piece.tokens
        positions += range(piece.start, piece.stop)
        slots += [
            piece.table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(piece.start, piece.stop)
        ]
    num_prompt_rows = sum(seq.count for seq in prompts)
    # By numpy: torch takes four times as long to make a small tensor from a list.
    columns = (torch.from_numpy(np.array(column, np.int64)) for column in (tokens, positions, slots))
    batch = Batch(next(columns), next(columns), next(columns), num_prompt_rows, prompts, decodes)
    return batch, None if _same(ordered, work) else torch.tensor(_rows_of(work, ordered))


def _form(piece: Work) -> bool:
    """Sort key: prompt form first."""
    return piece.decode


def _same(ordered: Sequence[Work], work: Sequence[Work]) -> bool:
    return all(a is b for a, b in zip(ordered, work, strict=True))


def _rows_of(work: Sequence[Work], ordered: Sequence[Work]) -> list[int]:
    """The index of each row of `work` among the rows of `ordered`."""
    starts, row = {}, 0
    for piece in ordered:
        starts[id(piece)] = row
        row += len(piece.tokens)
    return [starts[id(w)] + i for w in work for i in range(len(w.tokens))]
