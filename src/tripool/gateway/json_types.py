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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_list_of(fits: Callable[[Any], bool], value: object, max_items: int | None = None) -> bool:
    return isinstance(value, list) and (max_items is None or len(value) <= max_items) and all(map(fits, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_ids(value: object) -> bool:
    """Without a Python call per item: the list may be very long."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_prompt(value: object) -> bool:
    return _is_text(value) or _is_ids(value) or _is_list_of(_is_text, value) or _is_list_of(_is_ids, value)


def _is_bias(value: object) -> bool:
    """JSON has string keys only, so token ids arrive as "123"."""
    return isinstance(value, dict) and all(
        key.isascii() and key.isdecimal() and len(key) < 16 and _is_number(bias) for key, bias in value.items()
    )


def _is_stop(value: object) -> bool:
    return _is_text(value) or _is_list_of(_is_text, value, MAX_STOPS)


def _is_stream_options(value: object) -> bool:
    known = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(v, bool) for v in value.values())


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_choices(value: object) -> bool:
    return _is_list_of(_is_text, value)


def _list_schema(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT_SCHEMA = {"type": "string"}
_INTEGER_SCHEMA = {"type": "integer", "minimum": MIN_INTEGER, "maximum": MAX_INTEGER}
_IDS_SCHEMA = _list_schema(_INTEGER_SCHEMA)

INTEGER = JsonType("an integer", _INTEGER_SCHEMA, _is_integer)
NUMBER = JsonType("a number", {"type": "number"}, _is_number)
BOOLEAN = JsonType("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXT = JsonType("a string", _TEXT_SCHEMA, _is_text)
IDS = JsonType("a list of token ids", _IDS_SCHEMA, _is_ids)
STOP = JsonType(
    f"a string or a list of at most {MAX_STOPS} strings",
    {"anyOf": [_TEXT_SCHEMA, _list_schema(_TEXT_SCHEMA) | {"maxItems": MAX_STOPS}]},
    _is_stop,
)
BIAS = JsonType(
    "an object from token ids to numbers", {"type": "object", "additionalProperties": {"type": "number"}}, _is_bias
)
PROMPT = JsonType(
    "a string, a list of token ids, or a list of either",
    {"anyOf": [_TEXT_SCHEMA, _list_schema(_TEXT_SCHEMA), _IDS_SCHEMA, _list_schema(_IDS_SCHEMA)]},
    _is_prompt,
)
MESSAGES = JsonType(
    "a list of messages with role and content",
    _list_schema({"type": "object", "required": ["role", "content"]}) | {"minItems": 1},
    lambda value: _is_list_of(lambda message: isinstance(message, dict), value) and bool(value),
)
STREAM_OPTIONS = JsonType(
    'an object like {"include_usage": true}',
    {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
    },
    _is_stream_options,
)
OBJECT = JsonType("an object", {"type": "object"}, _is_object)
TOOLS = JsonType("a list of objects", _list_schema({"type": "object"}), lambda value: _is_list_of(_is_object, value))
TOOL_CHOICE = JsonType(
    "a string, or an object that names a function",
    {"anyOf": [_TEXT_SCHEMA, {"type": "object"}]},
    lambda value: _is_text(value) or _is_object(value),
)
SCHEMA = JsonType(
    "a JSON schema: an object, or its text",
    {"anyOf": [_TEXT_SCHEMA, {"type": "object"}]},
    lambda value: _is_text(value) or _is_object(value),
)
CHOICES = JsonType("a list of strings", _list_schema(_TEXT_SCHEMA), _is_choices)
TEXT_OR_BLOCKS = JsonType(
    "a string, or a list of text blocks",
    {"anyOf": [_TEXT_SCHEMA, _list_schema({"type": "object"})]},
    lambda value: _is_text(value) or _is_list_of(_is_object, value),
)
STOPS = JsonType(
    f"a list of at most {MAX_STOPS} strings",
    _list_schema(_TEXT_SCHEMA) | {"maxItems": MAX_STOPS},
    lambda value: _is_list_of(_is_text, value, MAX_STOPS),
)
