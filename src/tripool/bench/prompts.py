"""Prompts made of named pieces: equal names give equal tokens, and a short piece is a prefix of a longer one.

So prompts that share the first blocks of a trace share their first tokens, on any server and in any run with the same
seed. Independent of tokenizers: the ids or words to draw from are arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from struct import unpack
from typing import TypeVar

_T = TypeVar("_T")

MIN_POOL = 12
"""Fewest different words: with fewer, texts become too similar."""

ORDINARY_IDS = tuple(range(32, 224))
"""For servers without `/tokenize`: common vocabularies have single bytes here and no special tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    num_tokens: int


Pieces = tuple[Piece, ...]


class TokenPrompts:
    """Prompts as token ids, of exact length."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        assert 0 < len(ids) <= 2**16
        self._ids, self._seed = tuple(ids), seed

    def ids(self, pieces: Pieces) -> list[int]:
        return [
            token_id for piece in pieces for token_id in _drawn(self._ids, self._seed, piece.name, piece.num_tokens)
        ]


class TextPrompts:
    """Prompts as words that cost `word_tokens` each. A piece that is no multiple of that is up to a word shorter.

    `spare_tokens` are what a chat template adds around the text: the last piece makes room for them.
    """

    def __init__(self, words: Sequence[str], seed: int, *, word_tokens: int = 1, spare_tokens: int = 0) -> None:
        assert 0 < len(words) <= 2**16 and word_tokens > 0
        self._words = tuple(" " + word for word in words)
        self._seed, self._word_tokens, self._spare_tokens = seed, word_tokens, spare_tokens

    def text(self, pieces: Pieces) -> str:
        left = max(sum(piece.num_tokens for piece in pieces) - self._spare_tokens, self._word_tokens)
        texts = []
        for piece in pieces:
            num_words = min(piece.num_tokens, left) // self._word_tokens
            texts.append("".join(_drawn(self._words, self._seed, piece.name, num_words)))
            left -= min(piece.num_tokens, left)
        return "".join(texts)


def _drawn(pool: Sequence[_T], seed: int, name: str, count: int) -> list[_T]:
    """The first items of an infinite sequence determined by the name."""
    draws = unpack(f"<{count}H", shake_128(f"{seed}/{name}".encode()).digest(2 * count))
    size = len(pool)
    return [pool[draw % size] for draw in draws]


def choose_words(token_counts: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Words with the same, smallest possible number of tokens; and that number."""
    by_cost: defaultdict[int, list[str]] = defaultdict(list)
    for word, count in token_counts.items():
        if count > 0:
            by_cost[count].append(word)
    assert by_cost, "no words to choose from"
    many = [cost for cost, words in by_cost.items() if len(words) >= MIN_POOL]
    cost = min(many) if many else max(by_cost, key=lambda cost: len(by_cost[cost]))
    return tuple(by_cost[cost]), cost
