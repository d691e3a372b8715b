"""Costs of a chat template's filters and tests, each with the signature of its filter. No other filters exist.

A filter that reads items is given a list, so that all it compares or writes is measured before: the size of a
generator's items is unknown. Filters that only pass items on stay lazy, and are charged per item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import Namespace, pass_context

from tripool.text.budget import (
    ITEMS_PER_STEP,
    MAX_ITEMS,
    SIZED,
    Budget,
    budget_of,
    check,
    length,
    listed,
    metered,
    pay_keys,
    pay_search,
)
from tripool.text.template_calls import SLOW, joined, padded, replaced, stripped, turned
from tripool.text.template_formats import pay_percent

_VERY_SLOW = 32
"""As `SLOW`: regular expressions, and Python code."""
_ATTRIBUTE_STEPS = 2
_ESCAPES = 6
"""Most characters of JSON per character: `\\u0000`."""
_MAX_AROUND = 64
"""Of indents and separators in JSON."""
_MAX_DIGITS = 1024
"""Of numbers in other bases than ten, where Python has no bound."""
_MAX_PRECISION = 64

Cost = Callable[..., Any]
"""Takes the budget and the filter's arguments; returns the value for the filter where it replaces the value."""


def guarded_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """The filters with a cost. They take the context first, which also keeps them from being called when a template is
    compiled."""
    return {name: _guarded(name, filters[name], cost) for name, cost in _COSTS.items() if name in filters}


def _guarded(name: str, filter: Callable[..., Any], cost: Cost) -> Callable[..., Any]:
    @pass_context
    def guarded(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Namespace):
            raise SecurityError(f"a namespace has no '{name}'")
        budget = budget_of(context)
        budget.spend(1)
        replacing = cost(budget, value, *args, **kwargs)
        value = value if replacing is None else replacing
        made = filter(*_leading(context, filter), value, *args, **kwargs)
        return metered(budget, made) if isinstance(made, Iterator) else budget.settle(made)

    return guarded


def _leading(context: Context, function: Any) -> tuple[Any, ...]:
    """The arguments that Jinja itself would have passed first."""
    asked = getattr(function, "jinja_pass_arg", None)
    if asked is None:
        return ()
    return ({"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[asked.name],)


def _constant(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Nothing besides the filter's own step."""


def _attribute(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.spend(_ATTRIBUTE_STEPS)


# ---- texts ---------------------------------------------------------------------------------------------------------


def _read(budget: Budget, value: Any, *args: Any, times: float = 1, **kwargs: Any) -> None:
    budget.take(value, *args, *kwargs.values(), times=times)


def _text(budget: Budget, value: Any) -> str:
    """Converted to text as filters do."""
    budget.take(value)
    return value if isinstance(value, str) else str(value)


def _on_text(pay: Callable[..., None]) -> Cost:
    """The cost of a string method on the value as text."""
    return lambda budget, value, *args, **kwargs: pay(budget, _text(budget, value), *args, **kwargs)


def _center(budget: Budget, text: str, width: Any = 80) -> None:
    padded(budget, text, width)


def _escaped(budget: Budget, value: Any) -> None:
    budget.take(value, extra=4 * budget.text_size(value))


def _url(budget: Budget, value: Any) -> None:
    budget.take(value, extra=11 * budget.text_size(value), times=SLOW)


def _formatted(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    pay_percent(budget, _text(budget, value), kwargs or args)


def _indented(budget: Budget, value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    if not isinstance(value, str):
        raise TypeError("only a text can be indented")
    each = len(width) if isinstance(width, str) else max(width, 0)
    budget.take(value, times=SLOW)
    budget.take(value, extra=each * (len(value.splitlines()) + 1))


def _replaced(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = (_text(budget, part) for part in (value, old, new))
    replaced(budget, text, old, new, -1 if count is None else count)


def _json(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    around = indent if isinstance(indent, int) else len(indent or "")
    if around > _MAX_AROUND:
        raise SecurityError("an indent is too large")
    between = sum(len(part) for part in separators) if separators else 4
    if between > _MAX_AROUND:
        raise SecurityError("a separator is too long")
    size = budget.measure(value)
    if isinstance(value, Namespace):
        raise SecurityError("a namespace is not data")
    budget.take(extra=size.chars + size.items * (max(around, 0) * (size.depth + 1) + between))
    budget.spend(_ESCAPES * size.chars / 64 + size.items * (1 if indent is None else 4) * (2 if sort_keys else 1) / 4)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _integer(budget: Budget, value: Any, default: Any = 0, base: Any = 10) -> None:
    if isinstance(value, str) and base != 10 and len(value) > _MAX_DIGITS:
        raise SecurityError("a number has too many digits")
    _read(budget, value, times=SLOW)


def _rounded(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    _numbers(value, precision)  # for a string, the filter would make many copies first
    check(abs(precision), _MAX_PRECISION)


def _numbers(*values: Any) -> None:
    for value in values:
        if isinstance(value, jinja2.Undefined):
            value._fail_with_undefined_error()
        if not isinstance(value, (int, float, complex)):
            raise TypeError(f"a {type(value).__name__} is not a number")


# ---- lists ---------------------------------------------------------------------------------------------------------


def _parts(attribute: Any) -> int:
    return 1 + attribute.count(".") + attribute.count(",") if isinstance(attribute, str) else 1


def _handed_on(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    return metered(budget, value)


def _mapped(budget: Budget, value: Any, *args: Any, attribute: Any = None, **kwargs: Any) -> Any:
    budget.take(attribute)
    return metered(budget, value, 1 + _ATTRIBUTE_STEPS * _parts(attribute))


def _selected_by(budget: Budget, value: Any, attribute: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _mapped(budget, value, attribute=attribute)


def _keys(budget: Budget, value: Any, attribute: Any, default: Any = None) -> tuple[Any, list[Any]]:
    """The value as a list, and the key of each item that the filter will use, charged once."""
    if value is not None and not isinstance(value, (str, *SIZED)):
        value = listed(budget, value)
    if not isinstance(value, (str, *SIZED)):
        return value, []
    check(len(value), MAX_ITEMS)
    budget.spend(len(value) / ITEMS_PER_STEP)
    keys = list(value)
    if attribute is not None:
        budget.take(attribute)
        budget.spend(len(keys) * _ATTRIBUTE_STEPS * _parts(attribute))
        names = attribute.split(",") if isinstance(attribute, str) else [attribute]
        getters = [make_attrgetter(budget.environment, name, default=default) for name in names]
        keys = [getter(item) for item in keys for getter in getters]
    budget.take(keys)
    return value, keys


def _sorted(budget: Budget, value: Any, attribute: Any, default: Any = None) -> Any:
    value, keys = _keys(budget, value, attribute, default)
    rounds = math.log2(len(keys) + 2)
    budget.take(keys, times=rounds)
    steps = _ATTRIBUTE_STEPS * _parts(attribute) if attribute is not None else 0
    budget.spend(len(keys) * (1 + rounds / 8 + 2 * steps))
    return value


def _sort(budget: Budget, value: Any, reverse: Any = False, case_sensitive: Any = False, attribute: Any = None) -> Any:
    return _sorted(budget, value, attribute)


def _group(budget: Budget, value: Any, attribute: Any, default: Any = None, case_sensitive: Any = False) -> Any:
    value = _sorted(budget, value, attribute, default)
    budget.glance(value, value)
    return value


def _sort_dict(budget: Budget, value: Any, case_sensitive: Any = False, by: Any = "key", reverse: Any = False) -> None:
    _sorted(budget, value.items() if isinstance(value, dict) else (), None)


def _extreme(budget: Budget, value: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
    value, keys = _keys(budget, value, attribute)
    budget.take(keys, times=SLOW)
    budget.spend(len(keys) * (1 + _ATTRIBUTE_STEPS * _parts(attribute)))
    return value


def _unique(budget: Budget, value: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
    value, keys = _keys(budget, value, attribute)
    pay_keys(budget, keys)
    budget.spend(len(keys) * (1 + _ATTRIBUTE_STEPS * _parts(attribute)))
    return value


def _joined(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> Any:
    value, keys = _keys(budget, value, attribute)
    joined(budget, _text(budget, d), keys)
    return value


def _summed(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise SecurityError("only numbers can be summed")
    value, keys = _keys(budget, value, attribute)
    budget.glance(keys)
    return value


def _listed(budget: Budget, value: Any) -> Any:
    check(len(value) if isinstance(value, (str, *SIZED)) else 0, MAX_ITEMS)
    budget.spend(1 + (len(value) if isinstance(value, (str, *SIZED)) else 0) / ITEMS_PER_STEP)
    return listed(budget, value)


def _cut(budget: Budget, value: Any, count: Any, fill_with: Any = None) -> Any:
    _numbers(count)
    check(count, MAX_ITEMS)
    budget.spend(max(count, 0))
    return metered(budget, value)


def _batched(budget: Budget, value: Any, linecount: Any, fill_with: Any = None) -> Any:
    return _cut(budget, value, linecount)


def _sliced(budget: Budget, value: Any, slices: Any, fill_with: Any = None) -> Any:
    return _cut(budget, value, slices)


def _reversed(budget: Budget, value: Any) -> Any:
    value = listed(budget, value)
    budget.spend(1 + length(value) / ITEMS_PER_STEP)
    return value


_COSTS: Mapping[str, Cost] = {
    "attr": _attribute,
    **dict.fromkeys(("abs", "count", "d", "default", "filesizeformat", "first", "items"), _constant),
    **dict.fromkeys(("last", "length"), _constant),
    **dict.fromkeys(("safe", "string", "truncate"), _read),
    **dict.fromkeys(("title", "wordcount"), partial(_read, times=_VERY_SLOW)),
    **dict.fromkeys(("capitalize", "lower", "upper"), _on_text(turned)),
    **dict.fromkeys(("e", "escape", "forceescape"), _escaped),
    **dict.fromkeys(("reject", "select"), _handed_on),
    **dict.fromkeys(("rejectattr", "selectattr"), _selected_by),
    **dict.fromkeys(("max", "min"), _extreme),
    "batch": _batched,
    "center": _on_text(_center),
    "dictsort": _sort_dict,
    "float": partial(_read, times=SLOW),
    "format": _formatted,
    "groupby": _group,
    "indent": _indented,
    "int": _integer,
    "join": _joined,
    "list": _listed,
    "map": _mapped,
    "replace": _replaced,
    "reverse": _reversed,
    "round": _rounded,
    "slice": _sliced,
    "sort": _sort,
    "sum": _summed,
    "tojson": _json,
    "trim": _on_text(stripped),
    "unique": _unique,
    "urlencode": _url,
}


# ---- tests ---------------------------------------------------------------------------------------------------------

_COMPARING = frozenset(
    {"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="}
)
_WRITING = frozenset({"lower", "upper"})
_COUNTING = frozenset({"divisibleby", "even", "odd"})
"""They use `%`, which on a string is formatting."""
_LOOKING = frozenset(
    {"boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer", "iterable", "mapping", "none"}
) | {"number", "sameas", "sequence", "string", "test", "true", "undefined"}


def guarded_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    known = _COMPARING | _WRITING | _COUNTING | _LOOKING
    return {name: _guarded_test(name, test) for name, test in tests.items() if name in known} | {"in": is_in}


def _guarded_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    measured, numbers = name in _COMPARING | _WRITING, name in _COUNTING

    @pass_context
    def guarded(context: Context, value: Any, *args: Any) -> Any:
        budget = budget_of(context)
        budget.spend(1)
        if measured:
            budget.take(value, *args)
        if numbers:
            _numbers(value, *args)
        return test(*_leading(context, test), value, *args)

    return guarded


@pass_context
def is_in(context: Context, value: Any, container: Any) -> bool:
    budget = budget_of(context)
    if isinstance(value, str) and isinstance(container, str):
        pay_search(budget, len(container), len(value))
        return value in container
    container = listed(budget, container)
    if isinstance(container, dict):
        budget.take(value)  # hashed, then compared with the few keys of the same hash
    else:
        budget.take(value, container)
        budget.glance(container)
    return value in container
