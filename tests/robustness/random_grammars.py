"""Random grammars of every kind: schemas of any shape, patterns, EBNF, choices, tools; good ones, odd ones, large ones.

Not all of them can be used, and what cannot is to be refused in words. The rest is to be kept, or cut off, cleanly.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from grammar.schemas import random_schema
from robustness.random_requests import CHAT, COMPLETIONS, Asked, Body, leaving

Schema = dict[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_FORMATS = ("date-time", "date", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "nonsense")
_CLASSES = (
    "[a-z]",
    "[^a-z]",
    "\\d",
    "\\w",
    "\\s",
    ".",
    "(?s:.)",
    "[äöü]",
    "\\p{L}",
    "[\\u4e00-\\u9fff]",
    "🦊",
    "a",
    "\\n",
)


def random_grammar(rng: Random) -> Asked:
    kind = rng.choice(("schema", "schema", "schema", "regex", "regex", "ebnf", "choice", "tools", "object"))
    body: Body = {
        "max_tokens": rng.choice((1, 4, 16, 40)),
        "temperature": rng.choice((0, 0.8, 1.5, 100, 1e-38)),
        "seed": rng.getrandbits(63),
        "stream": rng.random() < 0.4,
    }
    extras: Body = {
        "n": rng.choice((1, 2, 3)),
        "top_p": rng.choice((1e-46, 0.5)),
        "repetition_penalty": rng.choice((1e-38, 2, 100)),
        "ignore_eos": True,
        "min_tokens": 1,
        "stop_token_ids": [rng.randrange(512) for _ in range(9)],
        "logit_bias": {str(rng.randrange(512)): -100 for _ in range(9)},
        "stop": ["}", "e"],
    }
    body |= {name: value for name, value in extras.items() if rng.random() < 0.12}
    if kind == "tools":
        return _tools(rng, body)
    path = rng.choice((CHAT, COMPLETIONS))
    asked: Body = (
        {"prompt": "Say it:"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Say it"}]}
    )
    return Asked(path, body | asked | _structure(rng, kind), leaving(rng), kind)


def _structure(rng: Random, kind: str) -> Body:
    if kind == "schema":
        schema = rng.choice((odd_schema, odd_schema, random_schema, large_schema))(rng)
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return rng.choice(
            ({"guided_json": schema}, {"response_format": named}, {"structured_outputs": {"json": schema}})
        )
    if kind == "object":
        return {"response_format": {"type": "json_object"}}
    if kind == "regex":
        return {rng.choice(("regex", "guided_regex")): pattern(rng, 3)}
    if kind == "choice":
        count = rng.choice((1, 2, 30, 500))
        return {"guided_choice": [f"{rng.choice(('yes', 'nein', 'да', '🦊', 'a b'))}{i}" for i in range(count)]}
    return {rng.choice(("ebnf", "guided_grammar")): rng.choice((gbnf, lark))(rng)}


def _tools(rng: Random, body: Body) -> Asked:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": _parameters(rng)}}
        for i in range(rng.randint(1, 3))
    ]
    choice: Any = rng.choice(("auto", "required", {"type": "function", "function": {"name": "f0"}}))
    body |= {"messages": [{"role": "user", "content": "Call one."}], "tools": tools, "tool_choice": choice}
    return Asked(CHAT, body, leaving(rng), "tools")


def _parameters(rng: Random) -> Schema:
    return random_schema(rng) if rng.random() < 0.5 else {"type": "object", "properties": {"x": odd_schema(rng, 2)}}


def odd_schema(rng: Random, levels: int = 3) -> Schema:
    """Anything that a schema may say, whether or not it makes sense together."""
    inner = max(levels - 1, 0)
    if levels and rng.random() < 0.25:
        several = [odd_schema(rng, inner) for _ in range(rng.randint(1, 3))]
        return {rng.choice(("anyOf", "oneOf", "allOf")): several}
    if rng.random() < 0.1:
        return rng.choice(
            ({}, {"const": None}, {"enum": [1, "a", None, [2], {"b": True}]}, {"$ref": "#"}, {"type": []})
        )
    schema: Schema = {"type": rng.choice(_TYPES)}
    if rng.random() < 0.1:
        schema["type"] = rng.sample(_TYPES, 2)
    low = rng.choice((-5, 0, 1, 10**9, 0.1))
    said = {
        "minimum": low, "exclusiveMinimum": low, "maximum": low + rng.choice((0, 1, 1e6)),
        "multipleOf": rng.choice((1, 2, 0.1, 7, 1e-9)),
        "minLength": rng.choice((0, 1, 7)), "maxLength": rng.choice((0, 7, 10**4)),
        "pattern": pattern(rng, 2), "format": rng.choice(_FORMATS),
        "minItems": rng.choice((0, 1, 3)), "maxItems": rng.choice((0, 3, 2000)), "uniqueItems": True,
        "additionalProperties": rng.choice((True, False, {"type": "integer"})),
        "patternProperties": {"^x": {"type": "integer"}}, "description": "x", "default": 1,
    }  # fmt: skip
    schema |= {name: value for name, value in said.items() if rng.random() < 0.15}
    if levels and rng.random() < 0.7:
        names = rng.sample(["a", "b", "ü", "a b", '"', "\\", "日本", ""], rng.randint(0, 4))
        schema["properties"] = {name: odd_schema(rng, inner) for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.5]
        schema["items"] = odd_schema(rng, inner)
    return schema


def large_schema(rng: Random) -> Schema:
    """Near the limits of what a grammar bears, on either side, at its beginning or behind a choice."""
    count = rng.choice((50, 200, 380, 420, 505, 900))
    kind = rng.choice(("integer", "string", "boolean"))
    wide: Schema = {"type": "object", "properties": {f"p{i}": {"type": kind} for i in range(count)}}
    if rng.random() < 0.5:
        wide["additionalProperties"] = False
    return rng.choice((wide, {"anyOf": [{"type": "string"}, wide]}, {"type": "array", "items": wide}))


def pattern(rng: Random, levels: int) -> str:
    if not levels:
        return rng.choice(_CLASSES)
    parts = [pattern(rng, levels - 1) for _ in range(rng.randint(1, 3))]
    joined = "|".join(parts) if rng.random() < 0.3 else "".join(parts)
    count = rng.choice(("", "", "*", "+", "?", "{2}", "{1,9}", "{0,300}", "{50,}"))
    return f"({joined}){count}" if rng.random() < 0.97 else joined + rng.choice("([*\\")


def gbnf(rng: Random) -> str:
    names = [f"r{i}" for i in range(rng.choice((1, 3, 12)))]

    def item() -> str:
        one = rng.choice((f'"{rng.choice(("a", "bc", " ", "é"))}"', "[a-z]", "[0-9]+", rng.choice(names)))
        return one + rng.choice(("", "", "*", "?", "+"))

    rules = [f"{name} ::= {' | '.join(' '.join([item(), item()]) for _ in range(rng.randint(1, 3)))}" for name in names]
    return "\n".join([f"root ::= {names[0]} {json.dumps(rng.choice(('.', '!')))}", *rules])


def lark(rng: Random) -> str:
    names = [f"r{i}" for i in range(rng.choice((1, 3, 12)))]

    def item() -> str:
        one = rng.choice((f'"{rng.choice(("a", "bc", " ", "é"))}"', f"/{rng.choice(('[a-z]+', '[0-9]', 'x{1,5}'))}/"))
        return rng.choice((one, one, rng.choice(names))) + rng.choice(("", "", "*", "?", "+"))

    rules = [f"{name}: {' | '.join(' '.join([item(), item()]) for _ in range(rng.randint(1, 3)))}" for name in names]
    return "\n".join([f"start: {names[0]}", *rules])
