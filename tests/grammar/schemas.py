"""Random JSON schemas, at least three levels deep: all a grammar promises to keep, and nothing that has no end."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "größe", "città", "имя", "名前", "is open", 'a"b', "tab\tkey", "emoji 🦊", "$price", "x/y", "b\\s")
WORDS = ("red", "grün", "bleu foncé", "синий", "青い", "🦊🌧", 'quote "it"', "back\\slash", "new\nline", "", "null", "7")
PATTERNS = (
    "^[A-Z]{2,4}-[0-9]{1,3}$",
    "^(rot|grün|blau)( (rot|grün|blau)){0,2}$",
    "^[а-яё]{3,8}$",
    "^[\\u4e00-\\u9fff]{1,4}$",
    "^\\d{3}(\\.\\d)?$",
    '^[^"\\\\]{1,10}$',
    "^\\w+@\\w{2,5}\\.(org|net)$",
)


def random_schema(rng: Random) -> Schema:
    """An object with three or four levels of objects and arrays inside one another."""
    return _object(rng, rng.randint(3, 4))


def depth(schema: Schema) -> int:
    """Levels of objects and arrays on the deepest way through the schema."""
    inner = [*schema.get("properties", {}).values(), *schema.get("prefixItems", []), *schema.get("anyOf", [])]
    inner += [schema["items"]] if isinstance(schema.get("items"), dict) else []
    own = 1 if schema.get("type") in ("object", "array") else 0
    return own + max(map(depth, inner), default=0)


def _any(rng: Random, levels: int) -> Schema:
    if levels > 0:
        return rng.choice((_object, _object, _array, _tuple, _either))(rng, levels)
    return rng.choice((_string, _pattern, _integer, _number, _enum, _const, _small, _nullable))(rng)


def _object(rng: Random, levels: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    deep = rng.choice(names)
    properties = {name: _any(rng, levels - 1 if name == deep or rng.random() < 0.2 else 0) for name in names}
    required = [name for name in names if name == deep or rng.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: Random, levels: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, levels - 1),
        "minItems": max(least, 1) if levels > 1 else least,
        "maxItems": least + rng.randint(1, 2),
    }


def _tuple(rng: Random, levels: int) -> Schema:
    items = [_any(rng, levels - 1), _any(rng, 0)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _either(rng: Random, levels: int) -> Schema:
    return {"anyOf": [_object(rng, levels), _array(rng, levels)]}


def _string(rng: Random) -> Schema:
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 24}


def _integer(rng: Random) -> Schema:
    low = rng.randint(-(10**6), 10**6)
    schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 7, 1000, 10**9))}
    return schema | ({"multipleOf": 1} if rng.random() < 0.3 else {})


def _number(rng: Random) -> Schema:
    """In quarters: no validator rounds them, and their digits come to an end."""
    low = rng.randint(-400, 400) / 4
    bounds = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    return {"type": "number", bounds[0]: low, bounds[1]: low + rng.choice((0.75, 10, 1e5)), "multipleOf": 0.25}


def _enum(rng: Random) -> Schema:
    return {"enum": [*rng.sample(WORDS, rng.randint(1, 5)), *rng.sample([1, -2.5, None, True], rng.randint(0, 2))]}


def _const(rng: Random) -> Schema:
    return {"const": rng.choice([*WORDS, {"a": [1, {"é": None}]}, [], 0, -1.5, False])}


def _small(rng: Random) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def _nullable(rng: Random) -> Schema:
    return {"type": ["string", "null"], "maxLength": rng.randint(1, 10)}
