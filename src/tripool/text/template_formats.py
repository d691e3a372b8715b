"""Length of the results of `%` and `format`: what Python's parsers would find, in one pass."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from tripool.text.budget import Budget

_MAX_DIGITS = 4
"""Of widths in formats."""
_PLAIN_TYPES = frozenset("sracoxXeEgG%")
_NUMBER_CHARS = 330
"""The largest float, written out."""
_FLAGS = re.compile(r"[#0\- +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?(.?)", re.DOTALL)
_STEPS_PER_FIELD = 2


def pay_percent(budget: Budget, form: str, values: Any) -> None:
    budget.take(form, times=4)  # the scan itself
    fields, padding = 0, 0
    for width, precision, kind in _percent_fields(form):
        fields += 1
        for number in (width, precision):
            if number == "*" or len(number) > _MAX_DIGITS:
                raise SecurityError("a width in a format is too large")
            padding += int(number or 0)
        padding += 8 if kind in _PLAIN_TYPES else _NUMBER_CHARS
    budget.take(form, extra=padding + fields * budget.text_size(values))
    budget.spend(fields)


def _percent_fields(form: str) -> Iterator[tuple[str, str, str]]:
    at = form.find("%")
    while at >= 0:
        at += 1
        if form.startswith("(", at):
            end = form.find(")", at)
            if end < 0:
                raise ValueError("incomplete format key")
            if form.find("(", at + 1, end) >= 0:  # Python counts them: the name continues after this `)`
                raise SecurityError("a name in a format has parentheses")
            at = end + 1
        found = _FLAGS.match(form, at)
        assert found is not None, "it matches nothing, too"
        yield found[1], found[2] or "", found[3]
        at = form.find("%", found.end())


def pay_format(budget: Budget, form: str, values: list[Any]) -> None:
    if any(callable(value) and not isinstance(value, jinja2.Undefined) for value in values):
        raise SecurityError("only data can be formatted")  # `{0.previtem}` of a loop has any length
    budget.take(form, times=4)
    largest, size = max(map(budget.text_size, values), default=0), len(form)
    for _, field, spec, _ in string.Formatter().parse(form):
        if field is None:
            continue
        budget.spend(_STEPS_PER_FIELD * (1 + field.count(".") + field.count("[")))
        numbers = re.findall(r"\d+", spec or "")
        if "{" in (spec or "") or any(len(number) > _MAX_DIGITS for number in numbers):
            raise SecurityError("a width in a format is too large")
        size += largest + sum(map(int, numbers)) + (_NUMBER_CHARS if spec else 8)
    budget.take(extra=size)
