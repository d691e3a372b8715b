"""What one gateway asks of all others: gathers their answers, within a deadline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ANSWER_S = 1.0
"""Longest wait for a gateway: one may be busy, stopped or dying."""


class Gathered(NamedTuple):
    """Who asked, the number of what it asked, and what the others said."""

    line: bytes
    number: int
    bodies: tuple[bytes, ...]


@dataclass(slots=True)
class _Question:
    line: bytes
    number: int
    """The asker's own."""
    until_s: float
    waiting: set[bytes]
    bodies: list[bytes] = field(default_factory=list)

    @property
    def gathered(self) -> Gathered:
        return Gathered(self.line, self.number, tuple(self.bodies))


class Questions:
    """Methods return what is complete by them."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, line: bytes, number: int, others: Iterable[bytes], now_s: float) -> tuple[int, list[Gathered]]:
        """Its number for the others."""
        own, self._next = self._next, self._next + 1
        question = self._open[own] = _Question(line, number, now_s + ANSWER_S, set(others))
        return own, self._close(own, question)

    def reply(self, line: bytes, number: int, body: bytes) -> list[Gathered]:
        question = self._open.get(number)
        if question is None or line not in question.waiting:
            return []
        question.waiting.discard(line)
        question.bodies.append(body)
        return self._close(number, question)

    def gone(self, line: bytes) -> list[Gathered]:
        self._open = {number: one for number, one in self._open.items() if one.line != line}
        for one in self._open.values():
            one.waiting.discard(line)
        return [done for number, one in list(self._open.items()) for done in self._close(number, one)]

    def tick(self, now_s: float) -> list[Gathered]:
        for one in self._open.values():
            if now_s >= one.until_s:
                one.waiting.clear()
        return [done for number, one in list(self._open.items()) for done in self._close(number, one)]

    def _close(self, number: int, question: _Question) -> list[Gathered]:
        if question.waiting:
            return []
        del self._open[number]
        return [question.gathered]
