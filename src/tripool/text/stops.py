"""Finds stop strings in text that arrives in pieces. Works on characters: no tokens, no requests.

An Aho-Corasick automaton: a state is the longest end of the text so far that could begin a stop string, so the work per
character depends neither on the number of stop strings nor on their lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """Position of a stop string, relative to the piece that completed it: `start` may be negative."""

    stop: str
    start: int
    end: int


class StopFinder:
    """Immutable once built; the caller keeps the state (0 at the beginning of a text) and may return to an old one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [""]  # the longest stop string that ends in this state
        self._fallback = [0]  # the next shorter end of the text that begins a stop string
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append("")
                self._fallback.append(0)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Breadth first, so that shorter states are complete before longer ones use them."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], char)
                queue.append(child)
            self._found[state] = self._found[state] or self._found[self._fallback[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def held_chars(self, state: int) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        while state and not self._next[state]:  # a complete stop string that nothing extends begins no other
            state = self._fallback[state]
        return self._depth[state]

    def advance(self, state: int, text: str) -> tuple[int, StopHit | None]:
        """The state after `text`, and of the stop strings completed in it the one that starts first.

        Of two that start at the same character, the shorter: it was complete first.
        """
        hit: StopHit | None = None
        if not self._next[0]:
            return 0, None
        for end, char in enumerate(text, start=1):
            state = self._step(state, char)
            found = self._found[state]
            if found and (hit is None or end - len(found) < hit.start):
                hit = StopHit(found, end - len(found), end)
        return state, hit
