"""Leaves out of a JSON schema what no grammar can promise, and says what that was. Pure.

What is left allows all that the schema allows. It is meant for schemas that ask for no promise (a tool without
`strict`): clients write keywords such as `uniqueItems` by themselves, and an answer guided by the rest is worth more to
them than a refusal. Annotations are left out too: they do not affect answers, and make equal grammars differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_ANNOTATIONS = frozenset({
    "description", "title", "$comment", "default", "examples", "example", "$schema", "$id", "deprecated", "readOnly",
    "writeOnly", "nullable", "discriminator", "markdownDescription", "$dynamicAnchor", "$recursiveAnchor",
})  # fmt: skip
_UNPROMISED = frozenset({
    "propertyNames", "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "x-guidance",
    "contentSchema", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
"""Keywords that llguidance does not have."""
_SAYS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "then": ({}, True),
    "else": ({}, True),
}
"""Values of these that allow everything."""
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_ONES = frozenset({"items", "additionalProperties", "additionalItems"})
_BEYOND = re.compile(r"\(\?(?:[=!>(]|<[=!]|P=)|\\(?:[bBAZzGK1-9]|k<)")
"""In a pattern: look-around, word borders, references and the like, which no automaton follows."""
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\[pP].")
_MAX_NAMED = 32
"""Parts named, of one schema."""

Relax = Callable[[Mapping[str, Any]], tuple[dict[str, Any], tuple[str, ...]]]
"""From a schema to one that allows all that it allows, and the places of what is left out."""


def relaxed(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy that a grammar can promise, and the places of what is left out, such as `properties/tags/uniqueItems`."""
    dropped: list[str] = []
    result = _Relaxing(schema, dropped).schema(schema, "")
    assert isinstance(result, dict)
    if len(dropped) > _MAX_NAMED:
        dropped = [*dropped[:_MAX_NAMED], f"and {len(dropped) - _MAX_NAMED} more"]
    return result, tuple(dropped)


def opened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Its type alone, for schemas of which no grammar can be made: contradictory or too large ones."""
    kept = {name: schema[name] for name in ("type",) if name in schema and _is_valid(name, schema[name], schema)}
    return {**kept, "additionalProperties": True}, ("*",)


class _Relaxing:
    def __init__(self, root: Mapping[str, Any], dropped: list[str]) -> None:
        self._root, self._dropped = root, dropped

    def schema(self, schema: object, at: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return {}
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            # A null says nothing, except as data.
            if keyword in _ANNOTATIONS or (value is None and keyword != "const"):
                continue
            if keyword in _UNPROMISED or not _is_valid(keyword, value, schema):
                if value not in _SAYS_NOTHING.get(keyword, ()):
                    self._drop(at, keyword)
                continue
            self._keep(copy, keyword, value, at)
        self._check_reference(copy, at)
        self._check_names(copy, at)
        self._check_union(copy, at)
        return copy

    def _drop(self, at: str, keyword: str) -> None:
        self._dropped.append(f"{at}{keyword}")

    def _keep(self, copy: dict[str, Any], keyword: str, value: Any, at: str) -> None:
        inside = f"{at}{keyword}/"
        if keyword in _NAMED:
            copy[keyword] = {name: self.schema(item, f"{inside}{name}/") for name, item in value.items()}
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            copy[keyword] = [self.schema(item, f"{inside}{number}/") for number, item in enumerate(value)]
        elif keyword in _ONES:
            copy[keyword] = self.schema(value, inside)
        elif keyword == "type" and isinstance(value, list):
            copy[keyword] = sorted(_TYPES & _texts(value), key=value.index)
        else:
            copy[keyword] = value

    def _check_reference(self, copy: dict[str, Any], at: str) -> None:
        reference = copy.get("$ref")
        if reference is not None and not _resolves(self._root, reference):
            del copy["$ref"]
            self._drop(at, "$ref")

    def _check_names(self, copy: dict[str, Any], at: str) -> None:
        """Of an object's properties: what is required must be possible, and patterns must exclude each other."""
        patterns = copy.get("patternProperties")
        if patterns and (len(patterns) > 1 or not all(map(_is_pattern, patterns))):
            del copy["patternProperties"]
            copy.pop("additionalProperties", None)
            self._drop(at, "patternProperties")
        declared, required = copy.get("properties", {}), copy.get("required", [])
        if copy.get("additionalProperties") is False and "patternProperties" not in copy:
            possible = [name for name in required if name in declared]
            if len(possible) < len(required):
                copy["required"] = possible
                self._drop(at, "required")
        if any(name not in required for name in declared):
            for keyword in ("minProperties", "maxProperties"):
                if copy.pop(keyword, None) is not None:
                    self._drop(at, keyword)

    def _check_union(self, copy: dict[str, Any], at: str) -> None:
        """`oneOf` is `anyOf` where no value fits two branches."""
        if "oneOf" not in copy:
            return
        branches = copy.pop("oneOf")
        if "anyOf" in copy or not _exclude_each_other(branches):
            self._drop(at, "oneOf")
        copy.setdefault("anyOf", branches)


def _is_valid(keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if keyword in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if keyword in _NUMBERS:
        return isinstance(value, (int, float))
    if keyword in _NAMED:
        return isinstance(value, dict)
    if keyword in _LISTS:
        return isinstance(value, list) and bool(value)
    if keyword == "type":
        return value in _TYPES if isinstance(value, str) else isinstance(value, list) and bool(_TYPES & _texts(value))
    if keyword == "format":
        return (isinstance(value, str) and value in _FORMATS) or schema.get("type", "string") != "string"
    if keyword == "pattern":
        return isinstance(value, str) and _is_pattern(value)
    if keyword == "enum":
        return isinstance(value, list) and bool(value)
    if keyword == "required":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    return True


def _texts(values: Sequence[object]) -> set[str]:
    return {value for value in values if isinstance(value, str)}


def _is_pattern(pattern: str) -> bool:
    if _BEYOND.search(pattern):
        return False
    try:
        re.compile(_CLASS.sub("p", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _resolves(root: Mapping[str, Any], reference: object) -> bool:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    place: Any = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal():
            place = place[int(name)] if int(name) < len(place) else None
        else:
            place = place.get(name) if isinstance(place, dict) else None
    return isinstance(place, (dict, bool)) and (reference == "#" or reference.startswith("#/"))


def _exclude_each_other(branches: Sequence[Any]) -> bool:
    """Whether that is certain: by their types, or by a required property with values of its own."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    kinds = [_kinds(branch) for branch in branches]
    if all(kinds) and sum(map(len, kinds)) == len(set().union(*kinds)):
        return True
    tags = [dict(_tags(branch)) for branch in branches]
    shared = set(tags[0]).intersection(*tags)
    return any(_all_differ([tag[name] for tag in tags]) for name in shared)


def _kinds(branch: Mapping[str, Any]) -> set[str]:
    if "const" in branch and branch["const"] is None:
        return {"null"}
    kinds = branch.get("type", [])
    # A whole number is a number too.
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _tags(branch: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name, schema in branch.get("properties", {}).items():
        if name in branch.get("required", []) and isinstance(schema, dict):
            if "const" in schema:
                yield name, [schema["const"]]
            elif isinstance(schema.get("enum"), list):
                yield name, schema["enum"]


def _all_differ(values: Sequence[list[Any]]) -> bool:
    flat = [value for few in values for value in few]
    return all(isinstance(value, str) for value in flat) and len(set(flat)) == len(flat)
