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
        places = [self._tables.buffer_info()[0]]
        for span in both:
            places.append(places[-1] + self._tables.itemsize * len(span.table))
        self._prompts = _spans(batch.prompts, places)
        self._decodes = _spans(batch.decodes, places[len(batch.prompts) :])
        self._tensors = batch.slots, batch.turns
        turns = None if batch.turns is None else batch.turns.data_ptr()
        self._struct = library.Batch(
            batch.num_rows,
            batch.num_prompt_rows,
            batch.slots.data_ptr(),
            turns,
            len(batch.prompts),
            len(batch.decodes),
            self._prompts.buffer_info()[0],
            self._decodes.buffer_info()[0],
            max(span.stop for span in both),
        )
        self.address = addressof(self._struct)


def _spans(some: Sequence[spans.Span], places: Sequence[int]) -> array[int]:
    """An array of C's `Span`: two pairs of 32-bit numbers and a pointer. A ctypes array costs fifty times the time."""
    words = array("q")
    for span, place in zip(some, places, strict=False):
        words.extend((span.row | span.count << 32, span.start | span.first << 32, place))
    return words


def native_batch(batch: Batch) -> int:
    if batch.native is None:
        batch.native = NativeBatch(batch)
    assert isinstance(batch.native, NativeBatch)
    return batch.native.address
