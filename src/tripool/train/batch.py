"""What a pass learns from: tokens, what is wanted after each, and what it counts. Made on the device of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.train.encode import ANSWER, PROMPT
from tripool.train.rows import NO_DOCUMENT, Rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """The token `distance` places on: [rows, row_tokens] of ids and of what getting it right counts."""

    tokens: torch.Tensor
    weights: torch.Tensor
    """float32; 0 across the end of a document, and where there is nothing to learn."""


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: torch.Tensor
    """int64 [rows, row_tokens]."""
    real: torch.Tensor
    """bool: of a document."""
    sight: torch.Tensor
    next: Wanted
    after_next: Wanted
    answers: torch.Tensor
    """float32: 1 where the next token is an assistant's."""


def make_batch(
    rows: Rows, numbers: torch.Tensor, prompt_loss: float, sight: Callable[[torch.Tensor], torch.Tensor]
) -> Batch:
    tokens = rows.tokens[numbers].long()
    documents, kinds = rows.documents[numbers], rows.kinds[numbers]
    weights = (kinds == ANSWER).float() + prompt_loss * (kinds == PROMPT).float()
    answers = wanted(tokens, documents, (kinds == ANSWER).float(), 1).weights
    return Batch(
        tokens=tokens,
        real=documents != NO_DOCUMENT,
        sight=sight(documents),
        next=wanted(tokens, documents, weights, 1),
        after_next=wanted(tokens, documents, weights, 2),
        answers=answers,
    )


def wanted(tokens: torch.Tensor, documents: torch.Tensor, weights: torch.Tensor, distance: int) -> Wanted:
    same = torch.zeros_like(documents, dtype=torch.bool)
    same[:, :-distance] = documents[:, distance:] == documents[:, :-distance]
    counted = same & (documents != NO_DOCUMENT)
    return Wanted(tokens.roll(-distance, 1), weights.roll(-distance, 1) * counted)
