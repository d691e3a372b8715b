"""The runner on an accelerator. Batches that only decode run as captured graphs, one for each batch size.

A captured step has a number of requests, query rows for each, and block-table columns, all rounded up. Its inputs lie
in one tensor, which one copy from pinned memory fills before each replay. Padding rows use a block that no sequence
owns. On a device without graphs the same step runs call by call.

A token that is not known to the host is given as `-1 - i`: the i-th of those that the last step sampled (`sampled`). No
call waits for the device, so the host may prepare a step while the last one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.block_tables import BlockTables
from tripool.engine.device_segments import ROWS, Segments
from tripool.engine.graph_capture import GraphCapture
from tripool.engine.memory import LargestStep
from tripool.engine.runner import Runner, batch_of
from tripool.kernels.cuda.rows import MAX_QUERIES, MOST_GATHERED, DeviceRows, PagedRows, to_device
from tripool.models import Batch, Model
from tripool.sequence import Work

_MAX_STEPS = 256
"""Captured at once; beyond it the one that was not used for longest goes."""
_MAX_SAMPLED = 4096
"""Tokens of one step that the next one may refer to."""
_WARM_TOKENS = 8192
"""Steps of contexts up to this length are captured before serving, where wide block tables cost nothing."""

Kind = Literal["hidden", "logits", "mtp"]
"""What a captured step returns: final hidden states, logits, or final hidden states of the MTP layer."""


@dataclass(frozen=True, slots=True)
class Size:
    requests: int
    queries: int
    width: int
    """Columns of the block table."""

    @property
    def rows(self) -> int:
        return self.requests * self.queries

    @property
    def splits(self) -> tuple[int, int, int]:
        """Sizes of the inputs in 32-bit numbers: tokens, positions and slots, which have 64 bits; table; seq_lens."""
        return 6 * self.rows, self.requests * self.width, self.requests

    @classmethod
    def of(cls, work: Sequence[Work], most_width: int, round_width: Callable[[int], int]) -> Size:
        queries = max(len(piece.tokens) for piece in work)
        # By the length that `fill` gives a request, padding rows included: kernels read the table up to there.
        width = -(-(max(piece.start for piece in work) + queries) // BLOCK_TOKENS)
        return cls(_round_up(len(work)), queries, min(round_width(width), most_width))


def _round_up(count: int) -> int:
    """To a power of two, above 16 to a multiple of 16: little padding, and few sizes."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def _few_widths(blocks: int) -> int:
    """8, 32, 128, ... columns: under load every number of requests meets contexts of every length, and each new pair is
    a capture for which all running sequences wait."""
    width = 8
    while width < blocks:
        width *= 4
    return width


@dataclass(slots=True)
class Step:
    """A captured step of one size: its input tensors, whose addresses stay, and the replay."""

    size: Size
    inputs: torch.Tensor
    """int32, see `Size.splits`."""
    order: torch.Tensor
    """See `DeviceRows`."""
    hidden_in: torch.Tensor | None
    """For the MTP layer: final hidden states of the tokens before."""
    run: Callable[[], torch.Tensor] = field(init=False)

    def batch(self, first: int, ids: torch.Tensor) -> Batch:
        """`ids`: see `id_index`."""
        size = self.size
        columns, table, seq_lens = self.inputs.split(size.splits)
        tokens, positions, slots = columns.view(torch.int64).view(3, -1)
        rows = PagedRows(table.view(size.requests, size.width), seq_lens, size.queries, first)
        native = DeviceRows((), rows, self.order)
        return Batch(ids.index_select(0, tokens), positions, slots, 0, [], [], native=native)

    def fill(self, work: Sequence[Work], tables: BlockTables, nowhere: int) -> None:
        """Write the rows of `work`, padded to the size."""
        size, count = self.size, len(work)
        values = np.empty(sum(size.splits), np.int32)
        wide, flat, seq_lens = np.split(values, np.cumsum(size.splits[:2]))
        columns = wide.view(np.int64).reshape(3, size.requests, size.queries)
        table = flat.reshape(size.requests, size.width)
        columns[:2], columns[2], table[:], seq_lens[:] = 0, nowhere * BLOCK_TOKENS, nowhere, size.queries
        starts = np.array([piece.start for piece in work], np.int32)
        rows = tables.indices([piece.table for piece in work])
        table[:count] = tables.values[rows, : size.width]
        # A request with fewer rows than `queries`: its context is longer by the rows that fill it up, and only those
        # rows see the rest.
        seq_lens[:count] = starts + size.queries
        for query in range(size.queries):
            has = np.flatnonzero([len(piece.tokens) > query for piece in work]) if query else np.arange(count)
            at = starts[has] + query
            columns[0, has, query] = [piece.tokens[query] for piece in work if len(piece.tokens) > query]
            columns[1, has, query] = at
            columns[2, has, query] = table[has, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        columns[0] = id_index(columns[0])
        self.inputs.copy_(pinned(torch.from_numpy(values), self.inputs), non_blocking=True)

    def rows_of(self, work: Sequence[Work]) -> list[int]:
        """The step's row of each row of `work`."""
        queries = self.size.queries
        if queries == 1:
            return list(range(len(work)))
        return [i * queries + row for i, piece in enumerate(work) for row in range(len(piece.tokens))]


def pinned(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A copy from unpinned memory would wait for the device."""
    return source.pin_memory() if target.is_cuda else source


def id_index(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each token's id is in the runner's table of ids: first those that the last step sampled, then all ids.
    So the device needs one gather for both kinds of tokens."""
    return np.where(tokens < 0, -1 - tokens, tokens + _MAX_SAMPLED)


class DeviceRunner(Runner):
    def __init__(
        self, model: Model, *, num_blocks: int, device: torch.device | str, dtype: torch.dtype, mtp: bool = False
    ) -> None:
        self.device, self._dtype, self._mtp = torch.device(device), dtype, mtp
        self._steps: dict[tuple[Size, Kind], Step] = {}
        """The last used one comes last."""
        self._nowhere = num_blocks
        self._width = -(-model.arch.context_tokens // BLOCK_TOKENS) + 1
        """Most columns of a block table: a padding row may be past the last position."""
        # Kernels that read pages in place stop at a context's end. The others, in float32 and of an MTP layer, gather
        # the whole width of a table.
        self._round_width = _round_up if mtp or dtype == torch.float32 else _few_widths
        self._tables = BlockTables(self._width)
        self._capture = GraphCapture(self.device) if self.device.type == "cuda" else None
        self._kept_logits: torch.Tensor | None = None
        self._ids = torch.arange(-_MAX_SAMPLED, model.arch.vocab, device=self.device).clamp_min_(0)
        """See `id_index`."""
        super().__init__(model, num_blocks=num_blocks, mtp=mtp)
        self._segments = Segments(model, self.kv, num_blocks, self._capture) if model.has_segments else None

    def _memory(self, layers: int, num_blocks: int, width: int) -> torch.Tensor:
        """One more block than the scheduler has, for padding rows."""
        return torch.zeros(layers, (num_blocks + 1) * BLOCK_TOKENS, width, dtype=self._dtype, device=self.device)

    @torch.inference_mode()
    def warm(self, max_running: int, step_tokens: int, progress: Callable[[str], None] | None = None) -> None:
        """Kernels are compiled for the sizes of their inputs: decode steps of a short context are captured, with few
        widths those up to `_WARM_TOKENS`, and prompts up to `step_tokens` run once, all in the padding block. Graphs
        for longer contexts are captured when they occur: they need no new kernels."""
        context = min(self.model.arch.context_tokens, _WARM_TOKENS if self._round_width is _few_widths else 1)
        blocks = range(1, -(-context // BLOCK_TOKENS) + 1)
        widths = sorted({self._round_width(count) for count in blocks}, reverse=True)
        decodes = [
            [Work([0] * queries, min(width * BLOCK_TOKENS, context) - 1, [self._nowhere] * width, True)] * requests
            for requests in sorted({_round_up(count) for count in range(1, max_running + 1)}, reverse=True)
            for queries in range(1, (MAX_QUERIES if self._mtp else 1) + 1)
            for width in widths
        ]
        longest = min(step_tokens, self.model.arch.context_tokens - 1)
        # Triton compiles for multiples of 16 and for other numbers.
        powers = [min(longest, 1 << power) for power in range(4, longest.bit_length() + 1)]
        captured_rows = () if self._segments is None else [rows for rows in ROWS if rows <= longest]
        # The largest first: the others find room in its memory.
        lengths = sorted({length - odd for length in powers for odd in (0, 1)} | {*captured_rows}, reverse=True)
        prompts = [[Work([0] * count, 0, [self._nowhere] * -(-count // BLOCK_TOKENS), False)] for count in lengths]
        for i, work in enumerate(decodes + prompts, 1):
            if progress:
                progress(f"warming up, {i} of {len(decodes) + len(prompts)}")
            self._rehearse(work, len(work))

    @property
    def capture_s(self) -> float:
        """Time that captures have taken."""
        return 0.0 if self._capture is None else self._capture.capture_s

    @torch.inference_mode()
    def run_largest(self, largest: LargestStep) -> torch.Tensor:
        """Run the steps that take the most memory, all in the padding block; returns the logits of a full batch."""
        queries = MAX_QUERIES if self._mtp else 1
        most_logits = queries * largest.max_running
        segment = replace(largest, step_tokens=min(ROWS[-1], largest.step_tokens))
        for step in (largest, segment):
            work = step.prompts(self._nowhere, MOST_GATHERED)
            self._rehearse(work, min(most_logits, sum(len(piece.tokens) for piece in work)))
        return self._rehearse(largest.decodes(self._nowhere, queries), most_logits)

    def _rehearse(self, work: Sequence[Work], num_logits: int) -> torch.Tensor:
        """A step, with an MTP layer also one with drafts; logits of the first rows."""
        rows = range(num_logits)
        if len(work[0].tokens) == 1 or not work[0].decode:
            logits = self.step_logits(work, rows)
        if not self._mtp:
            return logits
        hidden = self.hidden(work)
        logits = self.logits(hidden[:num_logits])
        after = [Work(piece.tokens, piece.start + 1, piece.table + piece.table[:1], piece.decode) for piece in work]
        self.draft_logits(after, hidden, rows)
        return logits

    def import_block(self, block: int, data: memoryview) -> None:
        self._slots(block).copy_(pinned(self._as_block(data), self.kv), non_blocking=True)

    def sampled(self, count: int) -> torch.Tensor:
        """int64 [count], to be written: the tokens that a step samples, for the next one to refer to."""
        return self._ids[:count]

    @torch.inference_mode()
    def step_logits(self, work: Sequence[Work], rows: Sequence[int]) -> torch.Tensor:
        """Logits of these rows of `work`, valid until the next step. Writes the KV of all."""
        if _only_decodes(work):
            step, logits = self._captured(work, "logits")
            chosen = step.rows_of(work)
            places = [chosen[row] for row in rows]
            if places == list(range(len(places))):
                return logits[: len(places)]
            return logits.index_select(0, to_device(places, self.device))
        batch, order, hidden = self._run(work)
        if self._mtp:
            self._fill_mtp(work, batch, order, hidden)
        places = list(rows) if order is None else order[list(rows)].tolist()
        return self.logits(hidden.index_select(0, to_device(places, self.device))) if places else hidden[:0]

    @torch.inference_mode()
    def hidden(self, work: Sequence[Work]) -> torch.Tensor:
        if _only_decodes(work):
            return self._real(work, *self._captured(work, "hidden"))
        _, order, hidden = self._run(work)
        return hidden if order is None else hidden.index_select(0, to_device(order, self.device))

    def _run(self, work: Sequence[Work]) -> tuple[Batch, torch.Tensor | None, torch.Tensor]:
        """The network over work that is not captured as a whole: also the new index of each row (see `batch_of`), and
        final hidden states in the new order, valid until the next step."""
        batch, order = batch_of(work)
        columns = _columns(batch)
        if self._segments is None or self._segments.size_of(batch.num_rows) is None:
            self._upload(batch, columns)
            return batch, order, self.model.hidden(batch, self.kv)
        return batch, order, self._segments.run(batch, columns, self._ids)

    def _fill_mtp(self, work: Sequence[Work], batch: Batch, order: torch.Tensor | None, hidden: torch.Tensor) -> None:
        """The MTP layer's KV of a step that proposes nothing: of prompts, whose tokens are known, except the first row
        of a chunk; zeros elsewhere, as in `clear_mtp`."""
        self._mtp_kv.index_fill_(0, batch.slot_mapping, 0.0)
        after: list[Work] = []
        sources: list[int] = []
        row = 0
        for piece in work:
            if not piece.decode and len(piece.tokens) > 1:
                after.append(Work(piece.tokens[1:], piece.start + 1, piece.table, False))
                sources += range(row, row + len(piece.tokens) - 1)
            row += len(piece.tokens)
        if after:
            places = sources if order is None else order[sources]
            self.mtp_hidden(after, hidden.index_select(0, to_device(places, self.device)))

    @torch.inference_mode()
    def mtp_hidden(self, work: Sequence[Work], hidden: torch.Tensor) -> torch.Tensor:
        if _only_decodes(work):
            return self._real(work, *self._captured(work, "mtp", hidden))
        batch, order = self._batch(work, 1)
        if order is None:
            return self.model.mtp_hidden(batch, hidden, self.kv)
        order = order.to(self.device)
        return self.model.mtp_hidden(batch, hidden[torch.argsort(order)], self.kv).index_select(0, order)

    @torch.inference_mode()
    def draft_logits(self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        assert self.model.mtp is not None
        final = self.mtp_hidden(work, hidden)
        return self.model.mtp.head(final[to_device(list(rows), self.device)])

    def _batch(self, work: Sequence[Work], first: int) -> tuple[Batch, torch.Tensor | None]:
        batch, order = batch_of(work, first=first)
        self._upload(batch, _columns(batch))
        return batch, order

    def _upload(self, batch: Batch, columns: torch.Tensor) -> None:
        tokens, batch.positions, batch.slot_mapping = pinned(columns, self.kv).to(self.device, non_blocking=True)
        batch.tokens = self._ids.index_select(0, tokens)

    def _real(self, work: Sequence[Work], step: Step, out: torch.Tensor) -> torch.Tensor:
        """Without padding."""
        rows = step.rows_of(work)
        return out if len(rows) == len(out) else out.index_select(0, to_device(rows, self.device))

    def _captured(
        self, work: Sequence[Work], kind: Kind, hidden: torch.Tensor | None = None
    ) -> tuple[Step, torch.Tensor]:
        size = Size.of(work, self._width, self._round_width)
        known = self._steps.pop((size, kind), None)
        if known is None and len(self._steps) >= _MAX_STEPS:
            if self._capture is not None:
                torch.cuda.synchronize(self.device)  # the step may still run
            del self._steps[next(iter(self._steps))]
        step = self._steps[size, kind] = known or self._prepare(size, kind)
        step.fill(work, self._tables, self._nowhere)
        if hidden is not None:
            assert step.hidden_in is not None
            rows = step.rows_of(work)
            if len(rows) == size.rows:
                step.hidden_in.copy_(hidden)
            else:
                step.hidden_in.index_copy_(0, to_device(rows, self.device), hidden)
        return step, step.run()

    def _prepare(self, size: Size, kind: Kind) -> Step:
        inputs = torch.zeros(sum(size.splits), dtype=torch.int32, device=self.device)
        shape = (size.rows, self.model.arch.hidden)
        hidden = torch.zeros(shape, dtype=self._dtype, device=self.device) if kind == "mtp" else None
        step = Step(size, inputs, torch.arange(size.rows, device=self.device), hidden)
        step.fill([], self._tables, self._nowhere)

        def run() -> torch.Tensor:
            if step.hidden_in is not None:
                return self.model.mtp_hidden(step.batch(1, self._ids), step.hidden_in, self.kv)
            batch = step.batch(0, self._ids)
            final = self.model.hidden(batch, self.kv)
            if kind == "hidden":
                return final
            if self._mtp:
                self._mtp_kv.index_fill_(0, batch.slot_mapping, 0.0)
            return self._keep(self.model.logits(final))

        step.run = run if self._capture is None else self._capture(run)
        return step

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """One memory for the logits of all captured steps: those of a large batch take as much as all of its layers."""
        if self._kept_logits is None or len(self._kept_logits) < len(logits):
            self._kept_logits = torch.empty_like(logits)
        return self._kept_logits[: len(logits)].copy_(logits)


def _columns(batch: Batch) -> torch.Tensor:
    """int64 [3, rows], on the host: ids (see `id_index`), positions, slots."""
    tokens = torch.from_numpy(id_index(batch.tokens.numpy()))
    return torch.stack((tokens, batch.positions, batch.slot_mapping))


def _only_decodes(work: Sequence[Work]) -> bool:
    return all(piece.decode and len(piece.tokens) <= MAX_QUERIES for piece in work)
