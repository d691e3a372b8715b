"""One step's rows as tensors: built by the engine's runner, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tripool.kernels.sequence_rows import SequenceRows


class Piece(Protocol):
    """Tokens of one sequence at consecutive positions, in one form; what a batch is made of."""

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
    """Prompt-form rows come first, decode-form rows after them; spans index rows within their own half."""

    tokens: torch.Tensor
    """int64 [rows]."""
    positions: torch.Tensor
    """int64 [rows]."""
    slots: torch.Tensor
    """int64 [rows]: where each row's KV is written, block * 64 + offset."""
    num_prompt_rows: int
    prompts: list[SequenceRows]
    decodes: list[SequenceRows]
    cos_sin: torch.Tensor | None = None
    """complex64 [rows, rope / 2]: how far each row's position turns. Set by whoever needs it so."""
    native: object | None = None
    """A table's own form of all this, made when it is first needed."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)
