"""The runner on an accelerator. Batches that only decode run as captured graphs, one for each batch size.

A captured step has a number of requests, query rows for each, and block-table columns, all rounded up. Its input
tensors are filled from pinned memory before each replay. Padding rows use a block that no sequence owns. On a device
without graphs the same step runs call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.runner import Runner, batch_of
from tripool.kernels.cuda.rows import MAX_QUERIES, DeviceRows, PagedRows
from tripool.models import Batch, Model
from tripool.sequence import Work


@dataclass(frozen=True, slots=True)
class Size:
    requests: int
    queries: int
    width: int
    """Columns of the block table."""

    @property
    def rows(self) -> int:
        return self.requests * self.queries

    @classmethod
    def of(cls, work: Sequence[Work], most_width: int) -> Size:
        width = max(-(-piece.stop // BLOCK_TOKENS) for piece in work)
        queries = max(len(piece.tokens) for piece in work)
        return cls(_round_up(len(work)), queries, min(_round_up(width), most_width))


def _round_up(count: int) -> int:
    """To a power of two, above 16 to a multiple of 16: little padding, and few sizes."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


@dataclass(slots=True)
class Step:
    """A captured step of one size: its input tensors, whose addresses stay, and the replay."""

    size: Size
    columns: torch.Tensor
    """int64 [3, rows]: tokens, positions, slots."""
    table: torch.Tensor
    lengths: torch.Tensor
    hidden_in: torch.Tensor | None
    """For the MTP layer: final hidden states of the tokens before."""
    run: Callable[[], torch.Tensor] = field(init=False)

    def batch(self, first: int) -> Batch:
        rows = PagedRows(self.table, self.lengths, self.size.queries, first)
        tokens, positions, slots = self.columns
        order = torch.arange(self.size.rows, device=self.columns.device)
        return Batch(tokens, positions, slots, 0, [], [], native=DeviceRows((), rows, order))

    def fill(self, work: Sequence[Work], nowhere: int) -> list[int]:
        """Write the rows of `work`, padded to the size. Returns the indices of the real rows."""
        size = self.size
        # By numpy: torch takes several times as long for each small assignment.
        columns = np.zeros((3, size.requests, size.queries), np.int64)
        columns[2] = nowhere * BLOCK_TOKENS
        table = np.full((size.requests, size.width), nowhere, np.int32)
        lengths = np.full(size.requests, size.queries, np.int32)
        real: list[int] = []
        for i, piece in enumerate(work):
            count, blocks = len(piece.tokens), -(-piece.stop // BLOCK_TOKENS)
            positions = range(piece.start, piece.stop)
            slots = [piece.table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in positions]
            columns[:, i, :count] = piece.tokens, positions, slots
            table[i, :blocks] = piece.table[:blocks]
            # A request with fewer rows than `queries`: its context is longer by the rows that fill it up, and only
            # those rows see the rest.
            lengths[i] = piece.start + size.queries
            real.extend(range(i * size.queries, i * size.queries + count))
        inputs = (columns.reshape(3, -1), table, lengths)
        for target, source in zip((self.columns, self.table, self.lengths), inputs, strict=True):
            target.copy_(_pinned(torch.from_numpy(source), target), non_blocking=True)
        return real


def _pinned(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return source.pin_memory() if target.is_cuda else source


class DeviceRunner(Runner):
    def __init__(
        self, model: Model, *, num_blocks: int, device: torch.device | str, dtype: torch.dtype, mtp: bool = False
    ) -> None:
        self.device, self._dtype, self._mtp = torch.device(device), dtype, mtp
        self._steps: dict[tuple[Size, int], Step] = {}
        self._nowhere = num_blocks
        super().__init__(model, num_blocks=num_blocks, mtp=mtp)

    def _memory(self, layers: int, num_blocks: int, width: int) -> torch.Tensor:
        """One more block than the scheduler has, for padding rows."""
        return torch.zeros(layers, (num_blocks + 1) * BLOCK_TOKENS, width, dtype=self._dtype, device=self.device)

    @torch.inference_mode()
    def warm(self, max_running: int, step_tokens: int, progress: Callable[[str], None] | None = None) -> None:
        """Kernels are compiled for the sizes of their inputs: every decode step of a short context is captured, and
        prompts up to `step_tokens` run once, all in the padding block. Graphs for longer contexts are captured when
        they occur: they need no new kernels."""
        decodes = [
            [Work([0] * queries, 0, [self._nowhere], True)] * requests
            for requests in sorted({_round_up(count) for count in range(1, max_running + 1)})
            for queries in range(1, (MAX_QUERIES if self._mtp else 1) + 1)
        ]
        longest = min(step_tokens, self.model.arch.context_tokens - 1)
        # Triton compiles for multiples of 16 and for other numbers.
        powers = [min(longest, 1 << power) for power in range(4, longest.bit_length() + 1)]
        lengths = sorted({length - odd for length in powers for odd in (0, 1)})
        prompts = [[Work([0] * count, 0, [self._nowhere] * -(-count // BLOCK_TOKENS), False)] for count in lengths]
        for i, work in enumerate(decodes + prompts, 1):
            if progress:
                progress(f"warming up, {i} of {len(decodes) + len(prompts)}")
            hidden = self.hidden(work)
            self.logits(hidden[: len(work)])
            if self._mtp:
                after = [Work(piece.tokens, 1, piece.table + piece.table[:1], piece.decode) for piece in work]
                self.draft_logits(after, hidden, range(len(work)))

    @torch.inference_mode()
    def hidden(self, work: Sequence[Work]) -> torch.Tensor:
        if _only_decodes(work):
            return self._captured(work, None)
        batch, order = self._batch(work, 0)
        hidden = self.model.hidden(batch, self.kv)
        return hidden if order is None else hidden.index_select(0, order)

    @torch.inference_mode()
    def mtp_hidden(self, work: Sequence[Work], hidden: torch.Tensor) -> torch.Tensor:
        if _only_decodes(work):
            return self._captured(work, hidden)
        batch, order = self._batch(work, 1)
        if order is None:
            return self.model.mtp_hidden(batch, hidden, self.kv)
        return self.model.mtp_hidden(batch, hidden[torch.argsort(order)], self.kv).index_select(0, order)

    @torch.inference_mode()
    def draft_logits(self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        assert self.model.mtp is not None
        final = self.mtp_hidden(work, hidden)
        return self.model.mtp.head(final[torch.tensor(list(rows), dtype=torch.int64).to(self.device)])

    def _batch(self, work: Sequence[Work], first: int) -> tuple[Batch, torch.Tensor | None]:
        batch, order = batch_of(work, first=first)
        columns = torch.stack((batch.tokens, batch.positions, batch.slot_mapping)).to(self.device)
        batch.tokens, batch.positions, batch.slot_mapping = columns
        return batch, None if order is None else order.to(self.device)

    def _captured(self, work: Sequence[Work], hidden: torch.Tensor | None) -> torch.Tensor:
        size = Size.of(work, -(-self.model.arch.context_tokens // BLOCK_TOKENS))
        key = size, int(hidden is not None)
        if key not in self._steps:
            self._steps[key] = self._prepare(size, mtp=hidden is not None)
        step = self._steps[key]
        real = step.fill(work, self._nowhere)
        whole = len(real) == size.rows
        places = None if whole else torch.tensor(real).to(self.device)
        if hidden is not None:
            assert step.hidden_in is not None
            if places is None:
                step.hidden_in.copy_(hidden)
            else:
                step.hidden_in.index_copy_(0, places, hidden)
        out = step.run()
        return out if places is None else out.index_select(0, places)

    def _prepare(self, size: Size, *, mtp: bool) -> Step:
        step = Step(
            size,
            torch.zeros(3, size.rows, dtype=torch.int64, device=self.device),
            torch.full((size.requests, size.width), self._nowhere, dtype=torch.int32, device=self.device),
            torch.full((size.requests,), size.queries, dtype=torch.int32, device=self.device),
            torch.zeros(size.rows, self.model.arch.hidden, dtype=self._dtype, device=self.device) if mtp else None,
        )
        step.columns[2] = self._nowhere * BLOCK_TOKENS

        def run() -> torch.Tensor:
            if step.hidden_in is None:
                return self.model.hidden(step.batch(0), self.kv)
            return self.model.mtp_hidden(step.batch(1), step.hidden_in, self.kv)

        step.run = captured(run) if self.device.type == "cuda" else run
        return step


def _only_decodes(work: Sequence[Work]) -> bool:
    return all(piece.decode and len(piece.tokens) <= MAX_QUERIES for piece in work)


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`run` as a graph: the same launches over the same memory, and the same tensor each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels and opens libraries outside the graph
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
