"""Steps with prompts in captured pieces: everything between two attentions is a graph, and attention runs in between.

A graph knows the number of rows only, rounded up; attention knows the sequences. So a few graphs per layer cover every
mixture of prompts and decodes, and the host launches three or four kernels per layer instead of fifty. Padding rows
write into a block that no sequence owns, and their results are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.graph_capture import GraphCapture, borrowed
from tripool.kernels.cuda.rows import DeviceRows
from tripool.models import Batch, Model
from tripool.models.decoder import Attend

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Above, launches take less time than what they launch."""


class Segments:
    """All sizes share their inputs, and the memory of their graphs: one step runs at a time."""

    def __init__(self, model: Model, kv: torch.Tensor, nowhere: int, capture: GraphCapture | None) -> None:
        """`capture`: None on a device without graphs."""
        self._model, self._kv, self._nowhere, self._capture = model, kv, nowhere, capture
        self._columns = torch.zeros(3 * ROWS[-1], dtype=torch.int64, device=kv.device)
        """Tokens, positions, slots, for a number of rows at a time."""
        self._steps: dict[int, _Step] = {}

    @staticmethod
    def size_of(num_rows: int) -> int | None:
        """The rows of the step that takes so many; None: too many."""
        return next((rows for rows in ROWS if rows >= num_rows), None)

    def run(self, batch: Batch, columns: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`hidden` of the model for this batch; the result is valid until the next step. `columns` [3, rows]: where the
        batch's tokens are in `ids`, its positions and slots, on the host."""
        count = columns.shape[1]
        rows = self.size_of(count)
        assert rows is not None
        padded = columns.new_zeros(3, rows)
        padded[2] = self._nowhere * BLOCK_TOKENS
        padded[:, :count] = columns
        device = self._kv.device
        inputs = self._columns[: 3 * rows]
        inputs.copy_(padded.pin_memory().view(-1) if device.type == "cuda" else padded.view(-1), non_blocking=True)
        if rows not in self._steps:
            self._steps[rows] = _Step(self._model, self._kv, inputs.view(3, rows), ids, self._capture)
        tokens, batch.positions, batch.slot_mapping = inputs.view(3, rows)[:, :count]
        batch.tokens = tokens
        return self._steps[rows].run(batch)[:count]


class _Step:
    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        columns: torch.Tensor,
        ids: torch.Tensor,
        capture: GraphCapture | None,
    ) -> None:
        """`ids`: tokens are gathered from it, as a part of the first graph."""
        self._model, self._kv, self._columns, self._ids = model, kv, columns, ids
        self._order = torch.arange(columns.shape[1], device=columns.device)
        self._pieces: list[tuple[Callable[[], object], Attend]] = []
        self._attended: torch.Tensor | None = None
        self._last: Callable[[], object] = lambda: None
        self._hidden = columns
        if capture is None:
            return
        with capture.beside():
            self._through()
        self._record(capture)

    def run(self, batch: Batch) -> torch.Tensor:
        if not self._pieces:  # a device without graphs
            return self._through(lambda attend, attended: attend(batch, attended))
        assert self._attended is not None
        for replay, attend in self._pieces:
            replay()
            attend(batch, self._attended)
        self._last()
        return self._hidden

    def _batch(self) -> Batch:
        tokens, positions, slots = self._columns
        native = DeviceRows((), None, self._order)
        return Batch(self._ids.index_select(0, tokens), positions, slots, 0, [], [], native=native)

    def _through(self, attends: Callable[[Attend, torch.Tensor], None] | None = None) -> torch.Tensor:
        """Every segment once, call by call. Without `attends` attention finds nothing."""
        segments = self._model.segments(self._batch(), self._kv)
        attend = next(segments)
        while True:
            attended = self._room_for(attend)
            if attends is not None:
                attends(attend, attended)
            try:
                attend = segments.send(attended)
            except StopIteration as done:
                hidden: torch.Tensor = done.value
                return hidden

    def _record(self, capture: GraphCapture) -> None:
        assert self._attended is not None
        segments: Generator[Attend, torch.Tensor, torch.Tensor] | None = None
        while True:
            try:
                with capture.graph() as graph:
                    if segments is None:
                        segments = self._model.segments(self._batch(), self._kv)
                        attend = next(segments)
                    else:
                        attend = segments.send(self._attended)
            except StopIteration as done:  # the graph is complete all the same
                self._hidden, self._last = done.value, graph.replay
                return
            # The queries are read before the next graph runs, so their memory need not stay theirs.
            self._pieces.append((graph.replay, replace(attend, q=borrowed(attend.q))))

    def _room_for(self, attend: Attend) -> torch.Tensor:
        """One for all layers: the next one attends after it is read."""
        if self._attended is None:
            shape = len(attend.q), attend.attention.out_width
            self._attended = torch.zeros(shape, dtype=attend.q.dtype, device=attend.q.device)
        return self._attended
