"""What a chat template may cost: steps of one rendering, and the size of one value.

Deterministic: there is no clock, so that the same conversation is rendered or refused alike on every machine. The steps
grow with the conversation: real templates take some hundred for each message.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARS = 2**24
"""Of one value as text."""
MAX_ITEMS = 2**20
"""Of one list."""
MAX_NUMBER_BITS = 2**12
_MAX_DEPTH = 100
_STEPS, _STEPS_PER_MESSAGE = 100_000, 2_000
CHARS_PER_STEP = 64
"""Text is copied and compared so much faster than code runs."""


class TooMuchWork(Exception):
    """A template has used up its budget."""


class Budget:
    """Of one rendering. Measures values, and remembers those that cannot change."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> None:
        self.left = float("inf")
        self._known: dict[int, tuple[Any, int]] = {}
        """By identity: the value, so that it stays where it is, and its size."""
        size = sum(len(message.get("content") or "") for message in messages) + self.size(tools)
        self.left = float(_STEPS + _STEPS_PER_MESSAGE * len(messages) + size)

    def spend(self, steps: float) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork

    def take(self, *values: Any, extra: int = 0) -> None:
        """Pay for work on these, with all that is in them; `extra`: characters that are made besides."""
        size = extra
        for value in values:
            size += len(value) if type(value) is str else self.text_size(value)
        if size > MAX_CHARS:
            check(size, MAX_CHARS)
        self.left -= 1 + size / CHARS_PER_STEP
        if self.left < 0:
            raise TooMuchWork

    def glance(self, *values: Any) -> None:
        """Pay for work on these, and on nothing inside them."""
        steps = 1.0 + len(values)
        for value in values:
            steps += length(value)
        self.spend(steps)

    def text_size(self, value: Any) -> int:
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is not text")
        return self.size(value)

    def size(self, value: Any, depth: int = 0) -> int:
        """About its length as text, however often a part of it comes. Lists and dicts never change in this sandbox."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, range):
            return 8 * len(value)
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            value = list(value)  # of a dict, and made anew each time: not remembered
            return 2 + sum(self.size(part, depth + 1) + 2 for part in value)
        if not isinstance(value, (list, tuple, dict)):
            if depth and isinstance(value, Namespace):
                raise SecurityError("a namespace can be in no list")  # it can change
            return 8 if not isinstance(value, int) else 8 + value.bit_length() // 3
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if depth > _MAX_DEPTH:
            raise SecurityError(f"a value is nested more than {_MAX_DEPTH} levels deep")
        self.spend(1 + len(value) / 4)
        parts = value if not isinstance(value, dict) else [part for item in value.items() for part in item]
        size = 2 + sum(self.size(part, depth + 1) + 2 for part in parts)
        self._known[id(value)] = value, size
        return size


def length(value: Any) -> float:
    """Steps that it takes to go through it once."""
    if isinstance(value, str):
        return len(value) / CHARS_PER_STEP
    return float(len(value)) if isinstance(value, (list, tuple, dict, range, KeysView, ValuesView, ItemsView)) else 0.0


def check(size: float, most: float) -> None:
    if size > most:
        raise SecurityError(f"a value of {size:,.0f} characters or items would be too large")
