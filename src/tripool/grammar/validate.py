"""Validates JSON values against JSON schemas within a number of steps: what no grammar enforces is checked after the
answer. Pure.

Patterns may take exponential time: `SchemaCheck` (see `validate_process.py`) runs this file in a process of its own
with limited CPU time where a schema has any, so it imports nothing of the package. Keywords are those of draft 2020-12,
and the older forms that clients still write.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

MAX_NAMED = 16
"""Violations named, and parts named that could not be checked."""
_MAX_DEPTH = 128


class TooManySteps(Exception):
    """The check takes longer than it may."""


@dataclass(slots=True)
class Findings:
    """Of one value. `violations` are pairs: a place in the schema, such as `properties/tags/uniqueItems`, and the place
    in the value, as a JSON pointer. `unchecked` are places in the schema that say something unknown here."""

    violations: list[tuple[str, str]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def violated(self, place: str, path: str) -> None:
        if len(self.violations) < MAX_NAMED:
            self.violations.append((place, path))

    def passed_over(self, place: str) -> None:
        if place not in self.unchecked and len(self.unchecked) < MAX_NAMED:
            self.unchecked.append(place)


def validated(schema: Any, value: Any, *, steps: int) -> Findings:
    """Raises TooManySteps."""
    findings = Findings()
    _Validation(schema, steps, findings.unchecked).check(schema, value, "", "", findings)
    return findings


def has_patterns(schema: Any) -> bool:
    """Whether a regular expression may occur in it."""
    if isinstance(schema, dict):
        return any(
            name in ("pattern", "patternProperties") or (name == "format" and item == "regex") or has_patterns(item)
            for name, item in schema.items()
        )
    return isinstance(schema, list) and any(map(has_patterns, schema))


class _Validation:
    """Each method named after keywords yields the places of those that a value violates; `check` also returns which
    properties and items were evaluated, as `unevaluatedProperties` and `unevaluatedItems` count them."""

    def __init__(self, root: Any, steps: int, unchecked: list[str]) -> None:
        self._root, self._left, self._unchecked = root, steps, unchecked
        self._depth = 0

    def check(self, schema: Any, value: Any, at: str, path: str, findings: Findings) -> set[Any]:
        self._left -= 1
        if self._left < 0 or self._depth > _MAX_DEPTH:
            raise TooManySteps
        if schema is False:
            findings.violated(at.rstrip("/") or "false", path)
        if not isinstance(schema, dict):
            return set()
        self._depth += 1
        try:
            for keyword in _own_violations(schema, value, at, findings):
                findings.violated(at + keyword, path)
            evaluated = self._composed(schema, value, at, path, findings)
            if isinstance(value, dict):
                evaluated |= self._properties(schema, value, at, path, findings)
                self._unevaluated(schema, value, "unevaluatedProperties", at, path, findings, evaluated)
            elif isinstance(value, list):
                evaluated |= self._items(schema, value, at, path, findings)
                self._unevaluated(schema, value, "unevaluatedItems", at, path, findings, evaluated)
        finally:
            self._depth -= 1
        return evaluated

    def _fits(self, schema: Any, value: Any, at: str) -> tuple[bool, set[Any]]:
        inner = Findings(unchecked=self._unchecked)
        evaluated = self.check(schema, value, at, "", inner)
        return not inner.violations, evaluated if not inner.violations else set()

    def _composed(self, schema: dict[str, Any], value: Any, at: str, path: str, findings: Findings) -> set[Any]:
        evaluated: set[Any] = set()
        reference = schema.get("$ref")
        if reference is not None:
            found, where = _resolved(self._root, reference)
            if where is None:
                findings.passed_over(f"{at}$ref")
            else:
                evaluated |= self.check(found, value, where, path, findings)
        for number, branch in enumerate(_list(schema, "allOf")):
            evaluated |= self.check(branch, value, f"{at}allOf/{number}/", path, findings)
        for keyword in ("anyOf", "oneOf"):
            fits = [self._fits(b, value, f"{at}{keyword}/{n}/") for n, b in enumerate(_list(schema, keyword))]
            evaluated = evaluated.union(*(keys for _, keys in fits))
            count = sum(fit for fit, _ in fits)
            if fits and (not count or (keyword == "oneOf" and count > 1)):
                findings.violated(at + keyword, path)
        if "not" in schema and self._fits(schema["not"], value, f"{at}not/")[0]:
            findings.violated(f"{at}not", path)
        if "if" in schema:
            held, keys = self._fits(schema["if"], value, f"{at}if/")
            evaluated |= keys
            chosen = "then" if held else "else"
            if chosen in schema:
                evaluated |= self.check(schema[chosen], value, f"{at}{chosen}/", path, findings)
        return evaluated

    def _properties(
        self, schema: dict[str, Any], value: dict[str, Any], at: str, path: str, findings: Findings
    ) -> set[Any]:
        declared, patterns = _dict(schema, "properties"), _dict(schema, "patternProperties")
        evaluated: set[Any] = set()
        for name, item in value.items():
            inside = f"{path}/{name}"
            places = [(declared[name], f"properties/{name}/")] if name in declared else []
            for pattern, sub in patterns.items():
                if _matches(pattern, name, f"{at}patternProperties", findings):
                    places.append((sub, f"patternProperties/{pattern}/"))
            if not places and "additionalProperties" in schema:
                places = [(schema["additionalProperties"], "additionalProperties/")]
            for sub, place in places:
                evaluated.add(name)
                self.check(sub, item, at + place, inside, findings)
            if "propertyNames" in schema and not self._fits(schema["propertyNames"], name, f"{at}propertyNames/")[0]:
                findings.violated(f"{at}propertyNames", inside)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, sub in _dict(schema, keyword).items():
                if name in value and not isinstance(sub, list):
                    evaluated |= self.check(sub, value, f"{at}{keyword}/{name}/", path, findings)
        return evaluated

    def _items(self, schema: dict[str, Any], value: list[Any], at: str, path: str, findings: Findings) -> set[Any]:
        evaluated: set[Any] = set()
        items, first, rest = schema.get("items"), _list(schema, "prefixItems"), "items"
        if isinstance(items, list):
            first, items, rest = items, schema.get("additionalItems"), "additionalItems"
        for number, item in enumerate(value):
            sub, place = (first[number], f"{number}/") if number < len(first) else (items, f"{rest}/")
            if sub is not None:
                evaluated.add(number)
                self.check(sub, item, at + place, f"{path}/{number}", findings)
        if "contains" in schema:
            found = {n for n, item in enumerate(value) if self._fits(schema["contains"], item, f"{at}contains/")[0]}
            evaluated |= found
            least, most = schema.get("minContains", 1), schema.get("maxContains", len(found))
            if _is_number(least) and _is_number(most) and not least <= len(found) <= most:
                findings.violated(f"{at}contains", path)
        return evaluated

    def _unevaluated(
        self, schema: dict[str, Any], value: Any, keyword: str, at: str, path: str, findings: Findings, seen: set[Any]
    ) -> None:
        if keyword not in schema:
            return
        for key in value if isinstance(value, dict) else range(len(value)):
            if key not in seen and not self._fits(schema[keyword], value[key], f"{at}{keyword}/")[0]:
                findings.violated(at + keyword, f"{path}/{key}")
            seen.add(key)


def _own_violations(schema: dict[str, Any], value: Any, at: str, findings: Findings) -> Iterator[str]:
    """Keywords that say something of the value itself."""
    kinds = _list(schema, "type") or [schema.get("type")]
    known = [_IS[kind] for kind in _texts(kinds) if kind in _IS]
    if known and not any(fits(value) for fits in known):
        yield "type"
    elif not known and schema.get("type") is not None:
        findings.passed_over(f"{at}type")
    if isinstance(schema.get("enum"), list) and _key(value) not in map(_key, schema["enum"]):
        yield "enum"
    if "const" in schema and _key(value) != _key(schema["const"]):
        yield "const"
    if _is_number(value):
        yield from _of_number(schema, value)
    elif isinstance(value, str):
        yield from _of_text(schema, value, at, findings)
    elif isinstance(value, list):
        yield from _of_size(schema, len(value), "minItems", "maxItems")
        if schema.get("uniqueItems") is True and len(set(map(_key, value))) < len(value):
            yield "uniqueItems"
    elif isinstance(value, dict):
        yield from _of_size(schema, len(value), "minProperties", "maxProperties")
        if any(name not in value for name in _texts(schema.get("required"))):
            yield "required"
        for keyword in ("dependentRequired", "dependencies"):
            for name, needed in _dict(schema, keyword).items():
                if name in value and any(one not in value for one in _texts(needed)):
                    yield keyword


def _of_number(schema: dict[str, Any], value: Any) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is True:  # draft 4
        above = least
    if below is True:
        below = most
    if _is_number(least) and value < least:
        yield "minimum"
    if _is_number(most) and value > most:
        yield "maximum"
    if _is_number(above) and value <= above:
        yield "exclusiveMinimum"
    if _is_number(below) and value >= below:
        yield "exclusiveMaximum"
    step: Any = schema.get("multipleOf")
    if _is_number(step) and step > 0:
        quotient = Decimal(repr(value)) / Decimal(repr(step))
        if quotient != quotient.to_integral_value():
            yield "multipleOf"


def _of_text(schema: dict[str, Any], value: str, at: str, findings: Findings) -> Iterator[str]:
    yield from _of_size(schema, len(value), "minLength", "maxLength")
    pattern, kind = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and _matches(pattern, value, f"{at}pattern", findings) is False:
        yield "pattern"
    if isinstance(kind, str):
        known = _FORMATS.get(kind)
        if known is None:
            findings.passed_over(f"{at}format")
        elif not _accepts(known, value):
            yield "format"


def _of_size(schema: dict[str, Any], size: int, least: str, most: str) -> Iterator[str]:
    if _is_number(schema.get(least)) and size < schema[least]:
        yield least
    if _is_number(schema.get(most)) and size > schema[most]:
        yield most


def _accepts(read: Callable[[str], Any], text: str) -> bool:
    try:
        return read(text) is not False
    except (ValueError, binascii.Error, re.error, OverflowError):
        return False


def _matches(pattern: str, text: str, place: str, findings: Findings) -> bool | None:
    """None where the pattern cannot be read here."""
    try:
        return re.search(_as_python(pattern), text, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        findings.passed_over(place)
        return None


_ECMA = re.compile(r"\\k<(\w+)>|\\.|\[(?:\\.|[^\]\\])*\]|\$|\(\?<(?=\w)", re.DOTALL)


def _as_python(pattern: str) -> str:
    """The same in Python's dialect: `$` is the very end, and groups are named otherwise."""

    def said(found: re.Match[str]) -> str:
        if found[1]:
            return f"(?P={found[1]})"
        return {"$": r"\Z", "(?<": "(?P<"}.get(found[0], found[0])

    return _ECMA.sub(said, pattern)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _dict(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _key(value: Any) -> str:
    """Equal for equal JSON: 1 is 1.0, and no boolean."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {name: _whole(item) for name, item in value.items()} if isinstance(value, dict) else value


def _resolved(root: Any, reference: object) -> tuple[Any, str | None]:
    """The schema, and its place; no place if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None, None
    place = root
    given = reference[2:].split("/") if reference != "#" else []
    names = [name.replace("~1", "/").replace("~0", "~") for name in given]
    for name in names:
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None, None
    return place, "".join(f"{name}/" for name in names)


_IS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_NAME}(?:\.{_NAME})*\Z")
_EMAIL = re.compile(r"[^\s@]{1,64}@[^\s@]{1,255}\Z")
_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)\Z", re.IGNORECASE | re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d\Z", re.ASCII)
_DURATION = re.compile(r"P(?!\Z)(\d+W\Z|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?\Z)", re.ASCII)


def _is_date(text: str) -> bool:
    return bool(_DATE.match(text)) and bool(datetime.date.fromisoformat(text))


def _is_date_time(text: str) -> bool:
    return len(text) > 11 and text[10] in "Tt " and _is_date(text[:10]) and bool(_TIME.match(text[11:]))


def _is_uri(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme) and bool(parts.netloc or parts.path) and not re.search(r"[\s<>\"{}|\\^`]", text)


_FORMATS: Mapping[str, Callable[[str], Any]] = {
    "date": _is_date,
    "date-time": _is_date_time,
    "time": lambda text: bool(_TIME.match(text)),
    "duration": lambda text: bool(_DURATION.match(text)),
    "email": lambda text: bool(_EMAIL.match(text)),
    "hostname": lambda text: bool(_HOST.match(text)),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": lambda text: str(UUID(text)) == text.lower(),
    "uri": _is_uri,
    "url": _is_uri,
    "byte": lambda text: base64.b64decode(text, validate=True),
    "base64": lambda text: base64.b64decode(text, validate=True),
    "regex": lambda text: re.compile(_as_python(text)),
    "json": json.loads,
}
"""Formats of texts that can be checked. Others, such as `password` and `path`, are left to the client."""
