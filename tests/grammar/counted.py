"""Counts calls of llguidance; and a compiler that waits on an event."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from llguidance import LLMatcher

from tripool.core import Structure
from tripool.grammar import compiler as compiler_module

DEADLINE_S = 60.0


class Counted:
    """A matcher that counts what it and its copies are asked for."""

    def __init__(self, matcher: LLMatcher, counts: Counter[str]) -> None:
        self._matcher, self._counts = matcher, counts

    def __getattr__(self, name: str) -> Any:
        if name in ("deep_copy", "compute_bitmask", "consume_token"):
            self._counts[name] += 1
        if name == "deep_copy":
            return lambda: Counted(self._matcher.deep_copy(), self._counts)
        return getattr(self._matcher, name)


def count_matchers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of all that are compiled from now on."""
    counts: Counter[str] = Counter()

    def make(*args: Any, **options: Any) -> Counted:
        counts["compile"] += 1
        return Counted(LLMatcher(*args, **options), counts)

    monkeypatch.setattr(compiler_module, "LLMatcher", make)
    return counts


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The events say that a grammar is being compiled, and let it go on."""
    began, go_on = threading.Event(), threading.Event()
    original = compiler_module.grammar_text

    def slow(structure: Structure) -> str:
        began.set()
        assert go_on.wait(DEADLINE_S)
        return original(structure)

    monkeypatch.setattr(compiler_module, "grammar_text", slow)
    try:
        yield began, go_on
    finally:
        go_on.set()
