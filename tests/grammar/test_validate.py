"""The validator of answers agrees with jsonschema, names what is violated, and ends within its steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tripool.grammar.validate import TooManySteps, has_patterns, validated

NAMES = st.sampled_from(["a", "b", "ab", "c1"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 1.0, 2.5]), NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
TYPES = st.sampled_from(["string", "number", "integer", "boolean", "null", "object", "array"])
PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(TYPES, st.lists(TYPES, min_size=1, max_size=2, unique=True)),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "multipleOf": st.sampled_from([0.5, 2, 3]),
        "minLength": st.integers(0, 2),
        "pattern": st.sampled_from(["^a", "b$", "^(?!a)", "[0-9]", r"^\w+$"]),
        "uniqueItems": st.booleans(),
        "minItems": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
    },
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=3)
    more = st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "1$"]), inner, max_size=1),
            "additionalProperties": inner,
            "propertyNames": inner,
            "items": inner,
            "prefixItems": few,
            "contains": inner,
            "minContains": st.integers(0, 2),
            "maxContains": st.integers(0, 2),
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "anyOf": few,
            "oneOf": few,
            "allOf": few,
            "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
            "unevaluatedProperties": inner,
            "unevaluatedItems": inner,
        },
    )
    return st.tuples(PLAIN, more).map(lambda two: {**two[0], **two[1]})


SCHEMAS = st.recursive(st.one_of(st.booleans(), PLAIN), nested, max_leaves=8)


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, VALUES)
def test_it_agrees_with_jsonschema(schema: Any, value: Any) -> None:
    assert (not validated(schema, value, steps=10**6).violations) == Draft202012Validator(schema).is_valid(value)


TAGS = {"type": "object", "properties": {"tags": {"$ref": "#/$defs/Tags"}}, "$defs": {"Tags": {"uniqueItems": True}}}


@pytest.mark.parametrize(
    ("schema", "value", "violations"),
    [
        (TAGS, {"tags": ["a", "a"]}, [("$defs/Tags/uniqueItems", "/tags")]),
        (TAGS, {"tags": [1, 1.0]}, [("$defs/Tags/uniqueItems", "/tags")]),
        (TAGS, {"tags": [1, True, "1"]}, []),
        ({"oneOf": [{"type": "integer"}, {"minimum": 0}]}, 1, [("oneOf", "")]),
        ({"properties": {"p": {"pattern": r"^(?=.*\d).{4,}$"}}}, {"p": "abcd"}, [("properties/p/pattern", "/p")]),
        ({"properties": {"p": {"pattern": r"^(?=.*\d).{4,}$"}}}, {"p": "abc1"}, []),
        ({"pattern": "a$"}, "a\n", [("pattern", "")]),
        ({"pattern": r"(?<x>.)\k<x>"}, "aa", []),
        ({"items": [{"type": "null"}], "additionalItems": False}, [None, 1], [("additionalItems", "/1")]),
        ({"dependencies": {"a": ["b"]}}, {"a": 1}, [("dependencies", "")]),
        ({"minimum": 1, "exclusiveMinimum": True}, 1, [("exclusiveMinimum", "")]),
        ({"required": None, "properties": None, "type": None}, {}, []),
        ({"format": "url"}, "no url", [("format", "")]),
        ({"format": "byte"}, "aGk=", []),
        ({"format": "date-time"}, "2026-02-30T00:00:00Z", [("format", "")]),
        ({"format": "ipv6"}, "::1", []),
        ({"format": "uuid"}, "12345678-1234-1234-1234-12345678901", [("format", "")]),
    ],
)
def test_violations_are_named_by_their_places(schema: Any, value: Any, violations: list[tuple[str, str]]) -> None:
    assert validated(schema, value, steps=1000).violations == violations


@pytest.mark.parametrize(
    "schema", [{"format": "password"}, {"pattern": r"\p{L}"}, {"$ref": "https://else/where"}, {"type": "any"}]
)
def test_what_is_unknown_is_said(schema: dict[str, Any]) -> None:
    findings = validated(schema, "x", steps=1000)
    assert findings.unchecked == list(schema) and not findings.violations


def test_steps_are_bounded() -> None:
    deep: Any = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "type": "null"}
    with pytest.raises(TooManySteps):
        validated(deep, "x", steps=10_000)
    wide = {"items": {"type": "integer"}}
    with pytest.raises(TooManySteps):
        validated(wide, list(range(2000)), steps=1000)
    assert not validated(wide, list(range(900)), steps=1000).violations


def test_patterns_are_found_wherever_they_are() -> None:
    assert has_patterns({"anyOf": [{}, {"not": {"properties": {"x": {"pattern": "a"}}}}]})
    assert has_patterns({"patternProperties": {"a": True}}) and has_patterns({"format": "regex"})
    assert not has_patterns({"properties": {"x": {"type": "string"}}})


KEYWORDS = [
    "type", "enum", "const", "required", "dependentRequired", "dependentSchemas", "dependencies", "properties",
    "patternProperties", "items", "additionalProperties", "propertyNames", "prefixItems", "additionalItems",
    "contains", "minContains", "maxContains", "uniqueItems", "minItems", "minLength", "minProperties", "minimum",
    "exclusiveMinimum", "multipleOf", "pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "$ref", "unevaluatedProperties", "unevaluatedItems",
]  # fmt: skip
ODD: list[Any] = [
    None,
    True,
    -5,
    1.5,
    "x",
    "#/x",
    [],
    [[]],
    ["a", {}],
    {},
    {"a": [[]]},
    {"a": 5},
    {"a": {"type": [[]]}},
]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_of_any_shape_fails_no_answer(keyword: str) -> None:
    for odd in ODD:
        for value in (None, 5, "a", [1, "a"], {"a": 1, "b": []}):
            validated({"if": {}, keyword: odd}, value, steps=1000)
