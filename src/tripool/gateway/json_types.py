"""JSON types that a field of a body may have: how each is recognised, named in an error and written in a schema.

Integers have at most 64 bits and numbers are finite: `decode_json` refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tripool.gateway.body import MAX_INTEGER, MIN_INTEGER

MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class JsonType:
    """A JSON type: how an error names it, how the schema writes it, how it is recognised."""

    says: str
    schema: Mapping[str, Any]
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_bias(value: object) -> bool:
    """JSON has string keys only, so token ids arrive as "123"."""
    return isinstance(value, dict) and all(
        key.isascii() and key.isdecimal() and len(key) < 16 and _is_number(bias) for key, bias in value.items()
    )


def _is_stream_options(value: object) -> bool:
    known = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(v, bool) for v in value.values())


def _list_of(item: JsonType, says: str, *, most: int | None = None) -> JsonType:
    schema = {"type": "array", "items": item.schema} | ({} if most is None else {"maxItems": most})

    def fits(value: object) -> bool:
        return isinstance(value, list) and (most is None or len(value) <= most) and all(map(item.fits, value))

    return JsonType(says, schema, fits)


def _any_of(says: str, *kinds: JsonType) -> JsonType:
    schema = {"anyOf": [kind.schema for kind in kinds]}
    return JsonType(says, schema, lambda value: any(kind.fits(value) for kind in kinds))


INTEGER = JsonType(
    "an integer",
    {"type": "integer", "minimum": MIN_INTEGER, "maximum": MAX_INTEGER},
    lambda value: isinstance(value, int) and not isinstance(value, bool),
)
NUMBER = JsonType("a number", {"type": "number"}, _is_number)
BOOLEAN = JsonType("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXT = JsonType("a string", {"type": "string"}, lambda value: isinstance(value, str))
OBJECT = JsonType("an object", {"type": "object"}, lambda value: isinstance(value, dict))
IDS = JsonType(
    "a list of token ids",
    {"type": "array", "items": INTEGER.schema},
    # Without a Python call per item: the list may be very long.
    lambda value: isinstance(value, list) and set(map(type, value)) <= {int},
)
CHOICES = _list_of(TEXT, "a list of strings")
TOOLS = _list_of(OBJECT, "a list of objects")
STOPS = _list_of(TEXT, f"a list of at most {MAX_STOPS} strings", most=MAX_STOPS)
STOP = _any_of(f"a string or {STOPS.says}", TEXT, STOPS)
PROMPT = _any_of(
    "a string, a list of token ids, or a list of either", TEXT, CHOICES, IDS, _list_of(IDS, "lists of ids")
)
TOOL_CHOICE = _any_of("a string, or an object that names a function", TEXT, OBJECT)
SWITCH = _any_of('true, false, or an object like {"type": "enabled"}', BOOLEAN, OBJECT)
SCHEMA = _any_of("a JSON schema: an object, or its text", TEXT, OBJECT)
TEXT_OR_BLOCKS = _any_of("a string, or a list of text blocks", TEXT, TOOLS)
BIAS = JsonType(
    "an object from token ids to numbers", {"type": "object", "additionalProperties": {"type": "number"}}, _is_bias
)
MESSAGES = JsonType(
    "a list of messages with role and content",
    {"type": "array", "items": {"type": "object", "required": ["role", "content"]}, "minItems": 1},
    lambda value: TOOLS.fits(value) and bool(value),
)
STREAM_OPTIONS = JsonType(
    'an object like {"include_usage": true}',
    {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
    },
    _is_stream_options,
)
