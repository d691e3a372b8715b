"""What is left of a schema is followed by the grammar, and allows all that the schema allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tripool.core import Structure
from tripool.grammar.relax import relaxed
from tripool.grammar.tools import or_answer, tool_structure

S, N = {"type": "string"}, {"type": "integer"}
CASES: list[tuple[dict[str, Any], list[str], list[Any]]] = [
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": N}, ["propertyNames"], [{"a": 1}]),
    ({"type": "object", "propertyNames": S, "additionalProperties": N}, [], [{"a": 1}]),
    ({"type": "array", "items": S, "uniqueItems": True}, ["uniqueItems"], [["a", "b"]]),
    ({"type": "array", "items": S, "uniqueItems": False}, [], [["a", "a"]]),
    ({"oneOf": [S, {"type": "string", "minLength": 2}]}, ["oneOf"], ["a"]),
    ({"oneOf": [S, N]}, [], ["a", 1]),
    ({"type": "string", "not": {"const": "x"}}, ["not"], ["a"]),
    ({"type": "string", "if": {"const": "x"}, "then": {"minLength": 1}}, ["if", "then"], ["a"]),
    ({"type": "array", "items": S, "contains": {"const": "x"}, "minContains": 1}, ["contains", "minContains"], [["x"]]),
    (
        {"type": "object", "properties": {"a": S, "b": S}, "dependentRequired": {"a": ["b"]}},
        ["dependentRequired"],
        [{"b": "x"}],
    ),
    (
        {"type": "object", "properties": {"a": S}, "unevaluatedProperties": False},
        ["unevaluatedProperties"],
        [{"a": "x"}],
    ),
    ({"type": "string", "pattern": "^(?=a)[a-z]+$"}, ["pattern"], ["ab"]),
    ({"type": "string", "pattern": "^\\p{L}+$"}, [], []),
    ({"type": "string", "format": "path"}, ["format"], ["/x"]),
    ({"$dynamicRef": "#x", "$defs": {"y": {"$dynamicAnchor": "x", **S}}}, ["$dynamicRef"], ["a"]),
    ({"type": "string", "format": "date"}, [], ["2026-01-31"]),
    ({"type": "object", "required": None, "properties": {"a": S}}, [], []),
    (
        {"type": "object", "properties": {"a": S}, "required": ["a", "zz"], "additionalProperties": False},
        ["required"],
        [],
    ),
    ({"type": "object", "properties": {"a": S, "b": S}, "minProperties": 1}, ["minProperties"], [{"a": "x"}]),
    ({"type": "object", "properties": {"a": {"$ref": "https://x.invalid/y"}}}, ["properties/a/$ref"], []),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": S}}, [], [{"a": "x"}]),
    ({"type": "any"}, ["type"], []),
    (
        {"type": "object", "patternProperties": {"^a": S, "b": S}, "additionalProperties": False},
        ["patternProperties"],
        [{"ab": "x"}],
    ),
]


@pytest.mark.parametrize(("schema", "places", "values"), CASES, ids=lambda v: json.dumps(v)[:60])
def test_the_rest_is_promised(guide_of, schema, places, values):
    rest, dropped = relaxed(schema)
    assert list(dropped) == places
    guide_of(Structure("json_schema", rest))  # raises what no grammar can promise
    for value in values:
        jsonschema.validate(value, schema)
        jsonschema.validate(value, rest)
    assert relaxed(rest) == (rest, ())


def test_annotations_make_no_difference():
    noted = {"type": "object", "title": "T", "properties": {"title": S | {"description": "d", "default": None}}}
    assert relaxed(noted) == ({"type": "object", "properties": {"title": S}}, ())


def test_branches_with_a_tag_of_their_own_exclude_each_other():
    def branch(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind}, "x": S}, "required": ["kind"]}

    rest, dropped = relaxed({"oneOf": [branch("a"), branch("b")]})
    assert dropped == () and len(rest["anyOf"]) == 2
    assert relaxed({"oneOf": [branch("a"), branch("a")]})[1] == ("oneOf",)
    assert relaxed({"oneOf": [N, {"type": "number"}]})[1] == ("oneOf",)


def test_places_are_bounded():
    many = {"type": "object", "properties": {f"p{i}": {"type": "array", "uniqueItems": True} for i in range(100)}}
    dropped = relaxed(many)[1]
    assert len(dropped) == 33 and dropped[-1] == "and 68 more"


def test_calls_or_an_answer(guide_of):
    calls = tool_structure([{"name": "f", "parameters": {"type": "object", "properties": {"a": S}}}], required=False)
    both = or_answer(calls, {"type": "object", "properties": {"n": N}, "required": ["n"]})
    mask = guide_of(both).mask()
    assert mask.sum() < guide_of(calls).mask().sum()
    required = tool_structure([{"name": "f"}], required=True)
    assert or_answer(required, {"type": "object"}) is required
