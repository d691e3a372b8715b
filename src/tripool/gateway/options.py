"""The fields that request bodies may have: one table, from which both the checks and the OpenAPI schema come.

Types are checked here; ranges belong to SamplingParams. A null is the same as leaving the field out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tripool.errors import InvalidRequest

MAX_STOPS = 16
MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Kind:
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
    return _is_list_of(_is_integer, value)


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
    known = {"include_usage", "include_obfuscation"}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(v, bool) for v in value.values())


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_choices(value: object) -> bool:
    return _is_list_of(_is_text, value)


def _list_schema(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT_SCHEMA = {"type": "string"}
_IDS_SCHEMA = _list_schema({"type": "integer"})

INTEGER = Kind("an integer", {"type": "integer"}, _is_integer)
NUMBER = Kind("a number", {"type": "number"}, _is_number)
BOOLEAN = Kind("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXT = Kind("a string", _TEXT_SCHEMA, _is_text)
IDS = Kind("a list of token ids", _IDS_SCHEMA, _is_ids)
STOP = Kind(
    f"a string or a list of at most {MAX_STOPS} strings",
    {"anyOf": [_TEXT_SCHEMA, _list_schema(_TEXT_SCHEMA) | {"maxItems": MAX_STOPS}]},
    _is_stop,
)
BIAS = Kind(
    "an object from token ids to numbers", {"type": "object", "additionalProperties": {"type": "number"}}, _is_bias
)
PROMPT = Kind(
    "a string, a list of token ids, or a list of either",
    {"anyOf": [_TEXT_SCHEMA, _list_schema(_TEXT_SCHEMA), _IDS_SCHEMA, _list_schema(_IDS_SCHEMA)]},
    _is_prompt,
)
MESSAGES = Kind(
    "a list of messages with role and content",
    _list_schema({"type": "object", "required": ["role", "content"]}) | {"minItems": 1},
    lambda value: _is_list_of(lambda message: isinstance(message, dict), value) and bool(value),
)
STREAM_OPTIONS = Kind(
    'an object like {"include_usage": true}',
    {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    _is_stream_options,
)
OBJECT = Kind("an object", {"type": "object"}, _is_object)
TOOLS = Kind("a list of objects", _list_schema({"type": "object"}), lambda value: _is_list_of(_is_object, value))
TOOL_CHOICE = Kind(
    "a string, or an object that names a function",
    {"anyOf": [_TEXT_SCHEMA, {"type": "object"}]},
    lambda value: _is_text(value) or _is_object(value),
)
SCHEMA = Kind(
    "a JSON schema: an object, or its text",
    {"anyOf": [_TEXT_SCHEMA, {"type": "object"}]},
    lambda value: _is_text(value) or _is_object(value),
)
CHOICES = Kind("a list of strings", _list_schema(_TEXT_SCHEMA), _is_choices)

SAMPLING: Mapping[str, Kind] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "logit_bias": BIAS,
    "n": INTEGER,
    "seed": INTEGER,
    "stop": STOP,
    "stop_token_ids": IDS,
    "min_tokens": INTEGER,
    "max_tokens": INTEGER,
    "ignore_eos": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
}
"""Handed to SamplingParams under the same names."""

STRUCTURE: Mapping[str, Kind] = {
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
    "regex": TEXT,
    "ebnf": TEXT,
    "guided_json": SCHEMA,
    "guided_regex": TEXT,
    "guided_choice": CHOICES,
    "guided_grammar": TEXT,
}
"""Ways to say what an answer must look like, of which a request may use one."""

_ANY_ENDPOINT: Mapping[str, Kind] = {
    **SAMPLING,
    **STRUCTURE,
    "model": TEXT,
    "stream": BOOLEAN,
    "stream_options": STREAM_OPTIONS,
}

CHAT: Mapping[str, Kind] = {
    "messages": MESSAGES,
    **_ANY_ENDPOINT,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
}

COMPLETION: Mapping[str, Kind] = {"prompt": PROMPT, **_ANY_ENDPOINT, "logprobs": INTEGER}

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Accepted and without effect: they steer a hosted service, not the answer."""

ONLY_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Known to OpenAI's clients and not served (tools: by completions): accepted with the values that ask for nothing."""


def checked(body: Mapping[str, Any], known: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields that mean something, each of the right type. Unknown ones are refused by name, never dropped."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                if not known[name].fits(value):
                    raise InvalidRequest(f"'{name}' must be {known[name].says}", param=name)
                fields[name] = value
        elif name in ONLY_PLAIN:
            # Compared with their types, as Python would take 0 for False and 1.0 for 1.
            if value is not None and not any(value == v and type(value) is type(v) for v in ONLY_PLAIN[name]):
                plain = " or ".join(map(repr, ONLY_PLAIN[name]))
                raise InvalidRequest(f"'{name}' is not supported", hint=f"leave it out, or send {plain}", param=name)
        elif name not in IGNORED:
            hint = f"known: {', '.join(sorted(known))}"
            raise InvalidRequest(f"unknown parameter '{name[:100]}'", hint=hint, param=name[:100])
    return fields


def schema(known: Mapping[str, Kind], required: str) -> dict[str, Any]:
    """The JSON schema of a body, for the OpenAPI page."""
    properties: dict[str, Any] = {
        name: dict(kind.schema) if name == required else {"anyOf": [kind.schema, {"type": "null"}]}
        for name, kind in known.items()
    }
    properties = {name: {} for name in (*IGNORED, *ONLY_PLAIN)} | properties
    return {"type": "object", "required": [required], "properties": properties, "additionalProperties": False}
