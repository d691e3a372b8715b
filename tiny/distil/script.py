"""What a document is to become: its kind, its turns, and for each turn who answers and what the answer must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TEACHER = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt that the teacher was tuned with. It answers best under it; the student never sees it."""

FEW = "Answer in three short sentences."
BRIEF = "Answer in one short sentence."
SOME = "Answer in four short sentences."
STEPS = "Answer with four short numbered steps."
STORY = "Write one short paragraph in simple words, with a clear and happy ending."


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`answer` is exact, by us; None: the teacher's, and the rest says how it is asked and judged."""

    user: str
    answer: str | None = None
    asked: str = ""
    """What the teacher is asked in place of `user`: the bare question with a wish for a short answer."""
    max_tokens: int = 160
    temperature: float = 0.45
    min_words: int = 12
    about: tuple[str, ...] = ()
    """Words of which the answer must hold at least one, in whatever form; none: it may be about anything."""
    must_have: tuple[str, ...] = ()
    """Words that the answer must hold, such as the hero's name."""
    whole: bool = False
    """Whether an answer that the limit cut is of no use, as with a story."""
    repeats: bool = False
    """Whether it may say again what was said before, as when asked to be shorter."""
    items: int = 0
    """How many numbered lines are wanted; 0: prose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    kind: str
    turns: tuple[Turn, ...]
    system: str | None = None
    """What the student sees as the system prompt."""


class Ask(NamedTuple):
    """A prompt to be answered."""

    ids: Sequence[int]
    max_tokens: int
    temperature: float


class Said(NamedTuple):
    """An answer: its tokens without the end token, and whether the limit cut it."""

    slot: int
    ids: list[int]
    cut: bool


def exact(kind: str, *pairs: tuple[str, str], system: str | None = None) -> Script:
    return Script(kind=kind, turns=tuple(Turn(user=user, answer=answer) for user, answer in pairs), system=system)
