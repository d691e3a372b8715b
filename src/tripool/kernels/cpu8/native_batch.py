"""One step's rows as C sees them: made once per step, shared by all its layers."""

from __future__ import annotations

from array import array

from tripool.kernels.batch import Batch

_HEAD = (0,) * 7


class NativeBatch:
    """C's `Batch` (`native/layers.h`), and after it its spans (`native/attend.h`), as 64-bit words in one piece of
    memory: a few microseconds, of which ctypes structures would take many."""

    def __init__(self, batch: Batch) -> None:
        spans = (*batch.prompts, *batch.decodes)
        self._tables = tables = array("i")
        for span in spans:
            tables.extend(span.table)
        place, size = tables.buffer_info()[0], tables.itemsize
        self._words = words = array("q", _HEAD)
        context = 0
        for span in spans:
            words.extend((span.row | span.count << 32, span.start | span.first << 32, place))
            place += size * len(span.table)
            context = max(context, span.start + span.count)
        self._tensors = batch.slots, batch.turns
        self.address, _ = words.buffer_info()
        num_prompts, first_span = len(batch.prompts), self.address + 8 * len(_HEAD)
        words[0] = batch.num_rows | batch.num_prompt_rows << 32
        words[1] = batch.slots.data_ptr()
        words[2] = 0 if batch.turns is None else batch.turns.data_ptr()
        words[3] = num_prompts | len(batch.decodes) << 32
        words[4] = first_span
        words[5] = first_span + 24 * num_prompts
        words[6] = context


def native_batch(batch: Batch) -> int:
    if batch.native is None:
        batch.native = NativeBatch(batch)
    assert isinstance(batch.native, NativeBatch)
    return batch.native.address
