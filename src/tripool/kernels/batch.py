"""Input of one step as tensors: built by the engine's runner, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tripool.kernels.sequence_rows import SequenceRows


class Piece(Protocol):
    """Tokens of one sequence at consecutive positions, in prompt form or in decode form; a batch is a list of them."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def table(self) -> Sequence[int]: ...
    @property
    def decode(self) -> bool: ...


@dataclass(slots=True)
class Batch:
    """Rows of one step: prompt-form rows first, then decode-form rows; `SequenceRows.row` counts within each of
    the two.
    """

    tokens: torch.Tensor
    """int64 [rows]."""
    positions: torch.Tensor
    """int64 [rows]."""
    slot_mapping: torch.Tensor
    """int64 [rows]: KV slot of each row, block * 64 + offset."""
    num_prompt_rows: int
    prompts: list[SequenceRows]
    decodes: list[SequenceRows]
    cos_sin: torch.Tensor | None = None
    """complex64 [rows, rope / 2]: rotary embedding of each row's position. Set by the layers that need it."""
    native: object | None = None
    """The kernel table's own form of the batch, made when first needed."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)
