"""The batch as the C kernels read it: made once per step, shared by all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tripool.kernels.batch import Batch, Piece
from tripool.kernels.table import Draw

_HEAD = (0,) * 7


class NativeBatch:
    """C's `Batch` (`native/layers.h`) followed by its `SequenceRows` (`native/attend.h`), as 64-bit words in one array:
    several times faster to fill than ctypes structures."""

    def __init__(self, batch: Batch) -> None:
        seqs = (*batch.prompts, *batch.decodes)
        self._tables = tables = array("i")
        for seq in seqs:
            tables.extend(seq.block_table)
        table_address, size = tables.buffer_info()[0], tables.itemsize
        self._words = words = array("q", _HEAD)
        context = 0
        for seq in seqs:
            words.extend((seq.row | seq.count << 32, seq.start | seq.first << 32, table_address))
            table_address += size * len(seq.block_table)
            context = max(context, seq.start + seq.count)
        self._tensors = batch.slot_mapping, batch.cos_sin
        self.address, _ = words.buffer_info()
        num_prompts, first_seq = len(batch.prompts), self.address + 8 * len(_HEAD)
        words[0] = batch.num_rows | batch.num_prompt_rows << 32
        words[1] = batch.slot_mapping.data_ptr()
        words[2] = 0 if batch.cos_sin is None else batch.cos_sin.data_ptr()
        words[3] = num_prompts | len(batch.decodes) << 32
        words[4] = first_seq
        words[5] = first_seq + 24 * num_prompts
        words[6] = context


def native_batch(batch: Batch) -> int:
    if batch.native is None:
        batch.native = NativeBatch(batch)
    assert isinstance(batch.native, NativeBatch)
    return batch.native.address


class NativePieces:
    """The same for pieces of work, prompt-form pieces first; C then computes slot mapping and rotary embedding
    itself.
    """

    def __init__(self, pieces: Sequence[Piece], first: int = 0) -> None:
        """`first`: see `SequenceRows.first`."""
        tables, tokens, num_prompts, num_prompt_rows, context = array("i"), array("q"), 0, 0, 0
        for piece in pieces:
            tables.extend(piece.table)
            tokens.extend(piece.tokens)
            if not piece.decode:
                num_prompts, num_prompt_rows = num_prompts + 1, len(tokens)
        table_address, size = tables.buffer_info()[0], tables.itemsize
        words, row = array("q", _HEAD), 0
        for number, piece in enumerate(pieces):
            count, start = len(piece.tokens), piece.start
            row = 0 if number == num_prompts else row  # decode-form rows are counted after the prompt-form ones
            words.extend((row | count << 32, start | first << 32, table_address))
            row, table_address, context = (
                row + count,
                table_address + size * len(piece.table),
                max(context, start + count),
            )
        self.num_rows, self.address = len(tokens), words.buffer_info()[0]
        self.tokens, _ = tokens.buffer_info()
        first_seq = self.address + 8 * len(_HEAD)
        words[0] = self.num_rows | num_prompt_rows << 32
        words[3] = num_prompts | len(pieces) - num_prompts << 32
        words[4], words[5], words[6] = first_seq, first_seq + 24 * num_prompts, context
        self._keep = tables, tokens, words


class NativeDraws:
    """C's `Draws` (`native/stack.h`) and its arrays. `count`: number of draws that belong to rows; default: all."""

    def __init__(self, rows: Sequence[int], draws: Sequence[Draw], count: int | None = None) -> None:
        wanted, self._chosen = array("i", rows), array("i", rows)
        temperatures, keys = array("f", [draw[0] for draw in draws]), array("Q", [draw[1] for draw in draws])
        arrays = (wanted, temperatures, keys, self._chosen)
        words = array("Q", [one.buffer_info()[0] for one in arrays])
        words.append(len(wanted) if count is None else count)
        self._keep = (*arrays, words)
        self.address, _ = words.buffer_info()

    def chosen(self) -> list[int]:
        return self._chosen.tolist()
