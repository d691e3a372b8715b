"""Token numbers by use: the exported vocabulary has the tokens of the training text in the order of their frequency.

A draft chooses among the first few thousand numbers only (a head of the whole vocabulary would cost as much to read as
two layers). A tokenizer numbers tokens in the order in which it learned them, from other text than ours: of our answers
81 % lie below 2,048 so, and 94 % by frequency. The tokens themselves, and how text is cut into them, stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tripool.text import TextFiles


def order_by_use(text: TextFiles, counts: Sequence[int]) -> list[int]:
    """`counts` by old number -> old numbers in their new order. Special tokens keep their numbers."""
    fixed = _special(text)
    others = [number for number in range(len(counts)) if number not in fixed]
    others.sort(key=lambda number: (-counts[number], number))
    rest = iter(others)
    return [number if number in fixed else next(rest) for number in range(len(counts))]


def renumbered(text: TextFiles, order: Sequence[int]) -> TextFiles:
    told = json.loads(text.tokenizer_json)
    number_of = {old: new for new, old in enumerate(order)}
    vocab = {token: number_of[number] for token, number in told["model"]["vocab"].items()}
    told["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda pair: pair[1]))
    return replace(text, tokenizer_json=json.dumps(told, ensure_ascii=False, separators=(",", ":")))


def _special(text: TextFiles) -> set[int]:
    return {added["id"] for added in json.loads(text.tokenizer_json).get("added_tokens", ())}
