"""The calls that a chat template may make, and their costs; everything else is refused.

Costs are worst cases of CPython's code: where that compares every pair of characters, they are a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from tripool.text.budget import (
    ITEMS_PER_STEP,
    MAX_ITEMS,
    MAX_KEY,
    Budget,
    check,
    listed,
    pay_keys,
    pay_product,
    pay_search,
)
from tripool.text.template_formats import pay_format

_NUMBER_METHODS = frozenset({"bit_length", "is_integer"})
_DATA_METHODS: Mapping[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    LoopContext: frozenset({"changed", "cycle"}),
}
SLOW = 4
"""Cost per character, in copies, of a lookup, a conversion or a new object."""
_ESCAPED = 5
"""Characters of `&#34;`."""


def pay_call(budget: Budget, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charges for the call and returns the arguments to call it with."""
    budget.glance(*args, *kwargs.values())
    if isinstance(called, (Macro, BlockReference, LoopContext, jinja2.Undefined)):  # an undefined one raises by itself
        return args
    if called in (dict, Namespace):
        return _pay_pairs(budget, args, kwargs)
    if called is safe_range:
        if any(isinstance(arg, int) and abs(arg) >= MAX_KEY for arg in args):
            raise SecurityError("a range is too large")
        return args
    function = getattr(called, "__wrapped__", called)  # Jinja wraps `format`
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        return _pay_text_method(budget, owner, name, args, kwargs)
    if owner is dict and name == "fromkeys":
        args = tuple(listed(budget, arg) for arg in args)
        pay_keys(budget, list(args[0]) if args else [])
        return args
    if isinstance(owner, (int, float)) and name in _NUMBER_METHODS:
        return args
    for kind, names in _DATA_METHODS.items():
        if isinstance(owner, kind) and name in names:
            budget.take(owner if name in ("count", "index") else (), *args, *kwargs.values())
            budget.glance(owner if name in ("copy", "count", "index") else ())
            return args
    if owner is None and isinstance(function, FunctionType):  # one of our own
        budget.take(*args, *kwargs.values())
        return args
    raise SecurityError(f"'{name[:100]}' of a {type(owner or called).__name__} is out of bounds")


def _pay_pairs(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    args = tuple(listed(budget, arg) for arg in args)
    for pairs in args:
        if isinstance(pairs, dict):
            budget.glance(pairs)
        elif isinstance(pairs, (list, tuple)):
            budget.take(pairs)
            pay_keys(budget, [pair[0] for pair in pairs if isinstance(pair, (list, tuple, str)) and pair])
        elif not isinstance(pairs, jinja2.Undefined):
            raise SecurityError(f"a {type(pairs).__name__} does not hold pairs")
    return args


def _pay_text_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    pay = TEXT_METHODS.get(name)
    if pay is None:
        raise SecurityError(f"'{name[:100]}' of a text is out of bounds")
    if name == "join":
        args = tuple(listed(budget, arg) for arg in args)
    if hasattr(text, "__html__"):  # it escapes its arguments
        budget.take(*args, *kwargs.values(), times=_ESCAPED)
    pay(budget, text, *args, **kwargs)
    return args


# ---- costs of string methods, with the signatures of the methods ---------------------------------------------------


def _copied(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    budget.take(text, *args, *kwargs.values())


def _compared(budget: Budget, text: str, *args: Any) -> None:
    budget.take(*args)


def turned(budget: Budget, text: str) -> None:
    """Some characters become three."""
    budget.take(text, extra=0 if text.isascii() else 2 * len(text), times=SLOW)


def _looked_at(budget: Budget, text: str) -> None:
    budget.take(text, times=SLOW)


def _found(budget: Budget, text: str, part: Any, *bounds: Any, backwards: bool = False) -> None:
    pay_search(budget, len(text), len(part) if isinstance(part, str) else 0, backwards=backwards)


def _parted(budget: Budget, text: str, part: Any, *, backwards: bool = False) -> None:
    _found(budget, text, part, backwards=backwards)
    budget.take(text)


def stripped(budget: Budget, text: str, chars: Any = None) -> None:
    budget.take(text)
    pay_product(budget, len(text), len(chars) if isinstance(chars, str) else 1)


def _split(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1, *, backwards: bool = False) -> None:
    if isinstance(sep, str) and sep:
        pay_search(budget, len(text), len(sep), backwards=backwards)
        pieces = text.count(sep) + 1  # counted forwards, an upper bound
    else:
        pieces = len(text) // 4 + 1
    check(pieces, MAX_ITEMS)
    budget.take(text)
    budget.spend(pieces / ITEMS_PER_STEP)


def _split_lines(budget: Budget, text: str, keepends: Any = False) -> None:
    _split(budget, text)


def padded(budget: Budget, text: str, width: Any = 0, *fill: Any) -> None:
    budget.take(text, extra=max(width, 0) if isinstance(width, int) else 0)


def _tabs_expanded(budget: Budget, text: str, tabsize: Any = 8) -> None:
    wide = max(tabsize, 0) if isinstance(tabsize, int) else 0
    budget.take(text, extra=text.count("\t") * wide, times=SLOW)


def replaced(budget: Budget, text: str, old: Any, new: Any, count: Any = -1) -> None:
    if not isinstance(old, str) or not isinstance(new, str):
        raise TypeError("replace needs strings")
    pay_search(budget, len(text), len(old))
    found = text.count(old) if old else len(text) + 1
    found = min(found, count) if isinstance(count, int) and count >= 0 else found
    budget.take(text, extra=found * max(len(new) - len(old), 0))
    budget.spend(found / ITEMS_PER_STEP)


def joined(budget: Budget, separator: str, values: Any) -> None:
    budget.take(values, extra=len(separator) * (len(values) if hasattr(values, "__len__") else 0))
    budget.glance(values)


def _formatted(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    pay_format(budget, text, [*args, *kwargs.values()])


TEXT_METHODS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("removeprefix", "removesuffix"), _copied),
    **dict.fromkeys(("startswith", "endswith"), _compared),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), turned),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"), _looked_at),
    **dict.fromkeys(("isnumeric", "isprintable", "isspace", "istitle", "isupper"), _looked_at),
    **dict.fromkeys(("count", "find", "index"), _found),
    **dict.fromkeys(("rfind", "rindex"), partial(_found, backwards=True)),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), stripped),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "partition": _parted,
    "rpartition": partial(_parted, backwards=True),
    "split": _split,
    "rsplit": partial(_split, backwards=True),
    "splitlines": _split_lines,
    "expandtabs": _tabs_expanded,
    "replace": replaced,
    "join": joined,
}
