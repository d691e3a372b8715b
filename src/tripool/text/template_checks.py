"""How large the results of a template's filters, methods and operators will be: refused before they are made."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from tripool.text.budget import CHARS_PER_STEP, MAX_CHARS, MAX_ITEMS, Budget, check, length

_MAX_PADDING = 2**12
"""Widths in formats."""
_PLAIN_TEXT_METHODS = frozenset(
    {
        *("capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
        *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
        *("isprintable", "isspace", "istitle", "isupper"),
    }
)
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def listed(value: Any) -> Any:
    """What is made item by item, whole; each item has been paid for by what made it."""
    if isinstance(value, (str, list, tuple, dict, jinja2.Undefined)) or not hasattr(value, "__iter__"):
        check(num_items(value) if not isinstance(value, str) else 0, MAX_ITEMS)
        return value
    found = []
    for item in value:
        found.append(item)
        check(len(found), MAX_ITEMS)
    return found


def num_items(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 0


def num_chars(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def check_repeated(budget: Budget, left: Any, right: Any) -> None:
    value, times = (left, right) if isinstance(right, int) else (right, left)
    if isinstance(times, int) and times > 0:
        check(num_items(value) * times, MAX_ITEMS)
        check(num_chars(value) * times, MAX_CHARS)
        budget.spend(length(value) * times)


def check_percent(budget: Budget, form: str, values: Any) -> None:
    padding = 0
    for width, precision in _PERCENT.findall(form):
        for number in (width, precision):
            if number == "*" or len(number) > 4:
                raise SecurityError("a width in a format is too large")
            padding += int(number or 0)
    budget.take(form, extra=padding + form.count("%") * (budget.text_size(values) + 8))


def _check_format(budget: Budget, form: str, values: list[Any]) -> None:
    largest, size = max(map(budget.text_size, values), default=0), len(form)
    for _, field, spec, _ in string.Formatter().parse(form):
        if field is None:
            continue
        if "{" in (spec or "") or re.search(r"\d{5}", spec or ""):
            raise SecurityError("a width in a format is too large")
        size += largest + _MAX_PADDING * bool(re.search(r"\d", spec or ""))
    budget.take(form, extra=size)


def check_joined(budget: Budget, separator: str, values: Any) -> None:
    count = len(values) if hasattr(values, "__len__") else 0
    budget.take(values, extra=len(separator) * count)


def _check_replaced(budget: Budget, text: str, old: str, new: str, most: int | None = None) -> None:
    found = text.count(old) if old else len(text) + 1
    found = min(found, most) if most is not None and most >= 0 else found
    budget.take(text, extra=found * max(len(new) - len(old), 0))


def check_text_method(budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name in ("startswith", "endswith"):
        return
    budget.take(text)
    if name in _PLAIN_TEXT_METHODS:
        if name in ("split", "rsplit", "splitlines"):
            separator = args[0] if args and name != "splitlines" else kwargs.get("sep")
            check(text.count(separator) if isinstance(separator, str) and separator else len(text) / 8, MAX_ITEMS)
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        width = args[0] if args else kwargs.get("tabsize", 8)
        if isinstance(width, int):
            check(width * (text.count("\t") if name == "expandtabs" else 1), MAX_CHARS)
            budget.spend(max(width, 0) / CHARS_PER_STEP)
    elif name == "replace":
        if all(isinstance(part, str) for part in args[:2]) and len(args) >= 2:
            _check_replaced(budget, text, *args[:2], *(count for count in args[2:3] if isinstance(count, int)))
    elif name in ("format", "format_map"):
        _check_format(budget, text, [*args, *kwargs.values()])
    elif name != "join":
        raise SecurityError(f"'{name}' of a text is out of bounds")


def _check_center(budget: Budget, value: Any, width: int = 80) -> None:
    check(width, MAX_CHARS)
    budget.spend(max(width, 0) / CHARS_PER_STEP)


def _check_indent(budget: Budget, value: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    each = len(width) if isinstance(width, str) else width
    budget.take(value, extra=max(each, 0) * (str(value).count("\n") + 1))


def _check_parts(budget: Budget, value: Any, count: int = 1, *_: Any, **kwargs: Any) -> None:
    count = kwargs.get("slices", kwargs.get("linecount", count))
    check(count, MAX_ITEMS)
    budget.spend(max(count, 0))


def _check_round(budget: Budget, value: Any, precision: int = 0, *_: Any, **__: Any) -> None:
    check(abs(precision), 64)


def _check_sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise SecurityError("only numbers can be summed")


def _check_json(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    indent = kwargs.get("indent", args[1] if len(args) > 1 else None)
    separators = kwargs.get("separators", args[2] if len(args) > 2 else None)
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise SecurityError("an indent is too large")
    if separators and sum(map(num_chars, separators)) > 64:
        raise SecurityError("a separator is too long")


def _check_filtered_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    check_joined(budget, str(d) if isinstance(d, (str, int)) else "", value)


def _check_filtered_replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    most = count if isinstance(count, int) else None
    _check_replaced(budget, str(value), str(old), str(new), most)


def _check_filtered_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    check_percent(budget, str(value), [*args, *kwargs.values()])


def _check_list(budget: Budget, value: Any) -> None:
    check(len(value) if hasattr(value, "__len__") else 0, MAX_ITEMS)


FILTER_CHECKS: Mapping[str, Callable[..., None]] = {
    "batch": _check_parts,
    "center": _check_center,
    "format": _check_filtered_format,
    "indent": _check_indent,
    "join": _check_filtered_join,
    "list": _check_list,
    "replace": _check_filtered_replace,
    "round": _check_round,
    "slice": _check_parts,
    "sum": _check_sum,
    "tojson": _check_json,
}
