"""One step's rows as C sees them: made once per step, shared by all its layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof

from tripool.kernels import spans
from tripool.kernels.batch import Batch
from tripool.kernels.cpu8 import library


class NativeBatch:
    def __init__(self, batch: Batch) -> None:
        both = (*batch.prompts, *batch.decodes)
        self._tables = array("i")
        for span in both:
            self._tables.extend(span.table)
        base = self._tables.buffer_info()[0]
        ends = [0]
        for span in both:
            ends.append(ends[-1] + len(span.table))
        places = [base + self._tables.itemsize * end for end in ends]
        self._prompts = _spans(batch.prompts, places)
        self._decodes = _spans(batch.decodes, places[len(batch.prompts) :])
        self._batch = batch.slots, batch.turns
        self._struct = library.Batch(
            batch.num_rows,
            batch.num_prompt_rows,
            batch.slots.data_ptr(),
            batch.turns.data_ptr(),
            len(batch.prompts),
            len(batch.decodes),
            self._prompts,
            self._decodes,
            max(span.stop for span in both),
        )
        self.address = addressof(self._struct)


def _spans(some: Sequence[spans.Span], places: Sequence[int]) -> object:
    facts = [library.Span(s.row, s.count, s.start, s.first, at) for s, at in zip(some, places, strict=False)]
    return (library.Span * len(some))(*facts)


def native_batch(batch: Batch) -> int:
    if batch.native is None:
        batch.native = NativeBatch(batch)
    assert isinstance(batch.native, NativeBatch)
    return batch.native.address
