"""The bundled model's vocabulary, and walks through grammars without any model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tripool.checkpoints import open_checkpoint
from tripool.core import Structure
from tripool.grammar import GrammarCompiler, Guide
from tripool.text import Tokenizer
from tripool.text.files import TextFiles

EXTRA_IDS = 37
"""Ids that the model has and its tokenizer does not."""

GuideOf = Callable[..., Guide]


@pytest.fixture(scope="session")
def text() -> TextFiles:
    with open_checkpoint("tiny") as checkpoint:
        return checkpoint.text


@pytest.fixture(scope="session")
def tokenizer(text: TextFiles) -> Tokenizer:
    return Tokenizer(text)


@pytest.fixture(scope="session")
def num_ids(tokenizer: Tokenizer) -> int:
    return tokenizer.vocab_size + EXTRA_IDS


@pytest.fixture(scope="session")
def compiler(text: TextFiles, num_ids: int) -> GrammarCompiler:
    return GrammarCompiler(text, num_ids)


@pytest.fixture(scope="session")
def guide_of(compiler: GrammarCompiler, text: TextFiles) -> GuideOf:
    def make(structure: Structure, ends: frozenset[int] = text.end_ids) -> Guide:
        return compiler.guide(structure, ends)

    return make


@pytest.fixture(scope="session")
def walk(tokenizer: Tokenizer) -> Callable[..., str]:
    """A random answer: any allowed token, with a liking for those that bring it to an end."""
    likings = [tokenizer.encode(text, special=False)[0] for text in ('"', "}", "]", ")")]

    def run(guide: Guide, rng: Random, *, max_tokens: int = 2000) -> str:
        ids: list[int] = []
        while not guide.spent and len(ids) < max_tokens:
            allowed = guide.mask().nonzero()[0].tolist()
            ends = [i for i in allowed if i in tokenizer.end_ids]
            liked = ends or [i for i in likings if i in allowed]
            hurry = rng.random() < 0.2 + len(ids) / 200
            token = rng.choice(liked if liked and hurry else allowed)
            guide.accept(token)
            if token in tokenizer.end_ids:
                return tokenizer.decode(ids, skip_special=False)
            ids.append(token)
        assert guide.done, f"no end in sight: {tokenizer.decode(ids)[:200]!r} {guide.error}"
        return tokenizer.decode(ids, skip_special=False)

    return run
