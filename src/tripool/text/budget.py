"""The budget of a chat template: steps of one rendering, and the size of one value.

Deterministic: without a clock, so that a conversation is rendered or refused alike on every machine. A step is about a
microsecond. The budget grows with the conversation: real templates take some hundred steps per message.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple, cast

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_CHARS = 2**24
"""Of one value as text."""
MAX_ITEMS = 2**20
"""Of one list."""
MAX_NUMBER_BITS = 2**12
_MAX_DEPTH = 100
_STEPS, _STEPS_PER_MESSAGE = 100_000, 2_000
CHARS_PER_STEP = 64
"""Characters copied or compared per step."""
ITEMS_PER_STEP = 8
"""List items filled per step."""
_OTHER_CHARS = 64
"""Size of a value that is neither text nor data: a macro, a generator. Its attributes are not measured."""
BUDGET_NAME = " budget"
"""A name that no template can write."""

_VIEWS = (KeysView, ValuesView, ItemsView)
SIZED = (list, tuple, dict, range, *_VIEWS)
_SCALARS = (float, complex, type(None), jinja2.Undefined)


class TooMuchWork(Exception):
    """A template has used up its budget."""


class Size(NamedTuple):
    """Of a value with all that it contains, repeated parts counted each time."""

    chars: int
    """Approximate length as text."""
    items: int = 0
    depth: int = 0


class Budget:
    """Of one rendering. Measures values, and caches the sizes of immutable ones."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        most_steps: float = float("inf"),
        environment: jinja2.Environment | None = None,
    ) -> None:
        self.environment = environment or jinja2.Environment()
        """Of the rendering: filters look attributes up by it."""
        self.left = float("inf")
        self._known: dict[int, tuple[Any, Size]] = {}
        """By identity: the value, to keep it alive, and its size."""
        size = sum(len(message.get("content") or "") for message in messages) + self.measure(tools).chars
        self.left = min(float(_STEPS + _STEPS_PER_MESSAGE * len(messages) + size), most_steps)

    def spend(self, steps: float) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork

    def take(self, *values: Any, extra: float = 0, times: float = 1) -> None:
        """Charge for work on these with all that they contain. `extra`: characters that are made besides; `times`:
        slowness in copies."""
        size = extra
        for value in values:
            size += len(value) if type(value) is str else self.text_size(value)
        if size > MAX_CHARS:
            check(size, MAX_CHARS)
        self.left -= 1 + times * size / CHARS_PER_STEP
        if self.left < 0:
            raise TooMuchWork

    def glance(self, *values: Any) -> None:
        """Charge for work on these, but not on their contents."""
        steps = 1.0 + len(values)
        for value in values:
            steps += length(value)
        self.spend(steps)

    def settle(self, made: Any) -> Any:
        """Charge for a result by its actual size: the estimate may have been too low by a factor, such as that of
        escapes. Also bounds numbers."""
        if isinstance(made, str):
            check(len(made), 2 * MAX_CHARS)
            self.spend(len(made) / CHARS_PER_STEP)
        elif isinstance(made, int):
            check(made.bit_length(), MAX_NUMBER_BITS)
        elif isinstance(made, (list, tuple)):
            check(len(made), MAX_ITEMS)
            self.spend(len(made) / ITEMS_PER_STEP)
        return made

    def text_size(self, value: Any) -> int:
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is not text")
        return self.measure(value).chars

    def measure(self, value: Any, depth: int = 0) -> Size:
        """Lists and dicts never change in this sandbox."""
        if isinstance(value, str):
            return Size(len(value))
        if isinstance(value, int):
            return Size(8 + value.bit_length() // 3)
        if isinstance(value, _SCALARS):
            return Size(8)
        if isinstance(value, range):
            return Size(8 * len(value), len(value), 1)
        if isinstance(value, _VIEWS):
            return self._measure_items(list(value), depth)  # a new list each time: not cached
        if not isinstance(value, (list, tuple, dict)):
            if depth:  # it may change, or reach more than it shows: `[loop]` contains `loop.previtem`
                raise SecurityError(f"a {type(value).__name__} in a list is out of bounds here")
            return Size(_OTHER_CHARS)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if depth > _MAX_DEPTH:
            raise SecurityError(f"a value is nested more than {_MAX_DEPTH} levels deep")
        size = self._measure_items(value, depth)
        self._known[id(value)] = value, size
        return size

    def _measure_items(self, value: Any, depth: int) -> Size:
        self.spend(1 + len(value) / 2)
        parts = value if not isinstance(value, dict) else [part for item in value.items() for part in item]
        chars, items, deepest = 2, len(value), 0
        for part in parts:
            size = self.measure(part, depth + 1)
            chars, items, deepest = chars + size.chars + 2, items + size.items, max(deepest, size.depth)
        return Size(chars, items, deepest + 1)


def budget_of(context: Context) -> Budget:
    return cast(Budget, context.parent[BUDGET_NAME])


def length(value: Any) -> float:
    """Steps to iterate over it once."""
    if isinstance(value, str):
        return len(value) / CHARS_PER_STEP
    return float(len(value)) if isinstance(value, SIZED) else 0.0


def check(size: float, most: float) -> None:
    if size > most:
        raise SecurityError(f"a value of {size:,.0f} characters or items would be too large")


def metered(budget: Budget, value: Any, steps: float = 1.0) -> Any:
    """The same value, charged this many steps per item when iterated."""
    if isinstance(value, Iterator):
        return _counted(budget, value, steps)
    if isinstance(value, (str, *SIZED)):
        budget.spend(1 + steps * len(value))
    return value


def _counted(budget: Budget, items: Iterator[Any], steps: float) -> Iterator[Any]:
    for item in items:
        budget.spend(steps)
        yield item


def listed(budget: Budget, value: Any) -> Any:
    """An iterator as a list, so that it can be measured."""
    if not isinstance(value, Iterator):
        return value
    found = []
    for item in value:
        budget.spend(1 / ITEMS_PER_STEP)
        found.append(item)
        check(len(found), MAX_ITEMS)
    return found


def pay_search(budget: Budget, in_chars: int, for_chars: int, *, backwards: bool = False) -> None:
    """Python searches long texts in linear time, but not short ones, and never backwards."""
    budget.spend(1 + in_chars / CHARS_PER_STEP)
    if backwards or in_chars < 2500 or (for_chars < 100 and in_chars < 30_000):
        budget.spend(max(in_chars - for_chars + 1, 0) * for_chars / _COMPARED_PER_STEP)
    else:
        budget.spend(in_chars / 16)


def pay_product(budget: Budget, left_chars: int, right_chars: int) -> None:
    """For each character of one, a search in the other."""
    budget.spend(left_chars * right_chars / _COMPARED_PER_STEP)


def pay_keys(budget: Budget, keys: Sequence[Any]) -> None:
    """Keys about to be hashed together. Numbers, and pairs of them, can be chosen to have one hash; then each is
    compared with each. Hashes of strings are secret."""
    for key in keys:
        if isinstance(key, int) and abs(key) >= MAX_KEY:
            raise SecurityError("a number is too large for a key")
    budget.take(list(keys))
    budget.spend(sum(not isinstance(key, (str, int)) for key in keys) ** 2 / 16)


_COMPARED_PER_STEP = 512
MAX_KEY = 2**60
"""Smaller numbers are their own hashes."""
