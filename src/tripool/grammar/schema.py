"""Prepares a JSON schema for llguidance: narrows it in two places, so that all it then allows was allowed before.

**Objects are closed** where they declare properties and do not mention others. Strictly, JSON Schema allows any further
property there, and a small model adds some. Where closing could contradict other parts it is not done.

**Exclusive bounds** at a whole number become inclusive ones slightly further in, if the other bound is within 1:
llguidance gives "34" for a number above 34 and below 34.5, as both begin with the same digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.errors import InvalidRequest

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Their values are data, not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Their keys are names, their values schemas."""
_BRANCHES = frozenset({"anyOf", "oneOf"})
_COMPOSED = _BRANCHES | {"$ref", "allOf"}
_OTHERS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "maxProperties"}
)
"""Keywords about undeclared properties."""
_OPEN = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""Keyword to the direction of the allowed numbers."""


def prepared(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """A copy. `param` names the schema in errors."""
    narrowed = _prepared(schema, param, not _mentions(schema, "allOf"))
    assert isinstance(narrowed, dict)
    return narrowed


def _prepared(schema: object, param: str, close: bool) -> object:
    if isinstance(schema, list):
        return [_prepared(item, param, close) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _DATA:
            copy[keyword] = value
        elif value is None:
            continue  # it says nothing: some clients send `"required": null`
        elif keyword in _NAMED and isinstance(value, dict):
            copy[keyword] = {name: _prepared(item, param, close) for name, item in value.items()}
        else:
            # A closed branch would forbid the properties beside it.
            copy[keyword] = _prepared(value, param, close and not (keyword in _BRANCHES and "properties" in schema))
    for keyword, direction in _OPEN.items():
        _move_in(copy, keyword, direction, param)
    if close and _declares_all(copy):
        copy["additionalProperties"] = False
    return copy


def _declares_all(schema: Mapping[str, Any]) -> bool:
    declared, required = schema.get("properties"), schema.get("required", [])
    if not declared or not isinstance(declared, dict) or not isinstance(required, list):
        return False
    return not schema.keys() & (_COMPOSED | _OTHERS) and all(name in declared for name in map(str, required))


def _mentions(schema: object, keyword: str) -> bool:
    if isinstance(schema, dict):
        return keyword in schema or any(_mentions(item, keyword) for item in schema.values())
    return isinstance(schema, list) and any(_mentions(item, keyword) for item in schema)


def _move_in(schema: dict[str, Any], keyword: str, direction: int, param: str) -> None:
    bound: Any = schema.get(keyword)
    width = _width(schema)
    if not _is_number(bound) or bound != int(bound) or not 0 < width < 1:
        return
    inclusive, step = keyword.removeprefix("exclusive").lower(), 0.001
    while step > width / 4:
        step /= 10
    moved = bound + direction * step
    if moved == bound:
        raise InvalidRequest(f"the schema's {keyword} of {bound} is too close to the other bound", param=param)
    del schema[keyword]
    tighter = max if direction > 0 else min
    schema[inclusive] = tighter(moved, schema[inclusive]) if _is_number(schema.get(inclusive)) else moved


def _width(schema: Mapping[str, Any]) -> float:
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if _is_number(schema.get(name))]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if _is_number(schema.get(name))]
    return min(highs) - max(lows) if lows and highs else float("inf")


def _is_number(value: object) -> bool:
    """A number within the range of a float, as all of llguidance's bounds are."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
