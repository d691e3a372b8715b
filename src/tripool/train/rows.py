"""Encoded documents packed into rows of one length, and the order in which steps read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tripool.train.encode import ANSWER, CUT_TOKENS, SKIPPED, Encoded

NO_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents. No document crosses a row; rows are filled up with `NO_DOCUMENT`."""

    tokens: torch.Tensor
    """int32 [rows, row_tokens]."""
    documents: torch.Tensor
    """int16 [rows, row_tokens]: numbered within a row, from 0."""
    kinds: torch.Tensor
    """uint8 [rows, row_tokens]: SKIPPED, PROMPT or ANSWER, of the token itself."""
    num_tokens: int
    """Of documents, without what fills rows up."""

    def to(self, device: torch.device) -> Rows:
        return Rows(self.tokens.to(device), self.documents.to(device), self.kinds.to(device), self.num_tokens)

    def counts(self, vocab: int) -> list[int]:
        """How often each token stands in an answer."""
        counted: list[int] = self.tokens[self.kinds == ANSWER].bincount(minlength=vocab).tolist()
        return counted

    def __len__(self) -> int:
        return len(self.tokens)


def pack(encoded: Sequence[Encoded], row_tokens: int, pad: int) -> Rows:
    """In the order given, each into the first open row that has room; a row is closed when it is full or old."""
    placed, num_rows = _places([min(len(one.tokens), row_tokens) for one in encoded], row_tokens)
    tokens = np.full((num_rows, row_tokens), pad, dtype=np.int32)
    documents = np.full((num_rows, row_tokens), NO_DOCUMENT, dtype=np.int16)
    kinds = np.zeros((num_rows, row_tokens), dtype=np.uint8)
    num_tokens = 0
    for one, (row, start, number) in zip(encoded, placed, strict=True):
        length = min(len(one.tokens), row_tokens)
        here = slice(start, start + length)
        tokens[row, here], kinds[row, here] = one.tokens[:length], one.kinds[:length]
        documents[row, here] = number
        if length < len(one.tokens):
            kinds[row, start + length - CUT_TOKENS : start + length] = SKIPPED
        num_tokens += length
    return Rows(torch.from_numpy(tokens), torch.from_numpy(documents), torch.from_numpy(kinds), num_tokens)


_OPEN_ROWS = 64


def _places(lengths: Sequence[int], row_tokens: int) -> tuple[list[tuple[int, int, int]], int]:
    """(row, start, number in the row) of each, and the number of rows."""
    placed: list[tuple[int, int, int]] = []
    opened: list[list[int]] = []  # row, filled, documents
    num_rows = 0
    for length in lengths:
        room = next((one for one in opened if one[1] + length <= row_tokens), None)
        if room is None:
            room = [num_rows, 0, 0]
            num_rows += 1
            opened.append(room)
            del opened[:-_OPEN_ROWS]
        placed.append((room[0], room[1], room[2]))
        room[1] += length
        room[2] += 1
        if room[1] == row_tokens:
            opened.remove(room)
    return placed, num_rows


def row_order(num_rows: int, seed: int, epoch: int) -> torch.Tensor:
    """A new shuffle for each epoch, and the same one whenever it is asked for."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=rng)


def rows_of_step(num_rows: int, count: int, step: int, seed: int) -> torch.Tensor:
    """Which rows a step learns from: a window over the endless line of shuffled epochs. Nothing has to be kept."""
    parts, at, left = [], step * count, count
    while left:
        epoch, offset = divmod(at, num_rows)
        part = row_order(num_rows, seed, epoch)[offset : offset + left]
        parts.append(part)
        at, left = at + len(part), left - len(part)
    return torch.cat(parts)
