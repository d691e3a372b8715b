"""What is changed in a schema before it is compiled: never more is allowed than its author allowed."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pytest

from tripool.core import Structure
from tripool.engine.fake import fake_text
from tripool.errors import InvalidRequest
from tripool.grammar import GrammarCompiler
from tripool.grammar.schema import prepared
from tripool.text import Tokenizer

NEAR = [Decimal(text) for text in ("0", "0.001", "-0.001", "0.1", "-0.1", "1", "-1")]


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], text: str) -> bool:
    """Letter by letter: the fake's vocabulary has a token for every byte."""
    guide = compiler.guide(Structure("json_schema", schema), tokenizer.end_ids)
    for token in tokenizer.encode(text):
        if not guide.mask()[token]:
            return False
        guide.accept(token)
    return bool(guide.mask()[sorted(tokenizer.end_ids)].all())


def test_no_number_is_out_of_bounds():
    text, rng = fake_text(), Random(3)
    tokenizer = Tokenizer(text)
    compiler = GrammarCompiler(text, tokenizer.vocab_size)
    num_right = 0
    for _ in range(60):
        low = Decimal(rng.randint(-90, 90)) / rng.choice((1, 1, 10))
        high = low + Decimal(rng.choice(("0.01", "0.5", "0.75", "1", "10")))
        low_word, high_word = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
        schema = {"type": "number", low_word: float(low), high_word: float(high)}
        for number in {(bound + step).normalize() for bound in (low, high) for step in NEAR}:
            above = number > low if low_word.startswith("ex") else number >= low
            below = number < high if high_word.startswith("ex") else number <= high
            accepted = accepts(compiler, tokenizer, schema, f"{number:f}")
            assert not accepted or (above and below), (schema, number)
            num_right += accepted
    assert num_right > 100


def test_only_schemas_are_touched():
    narrow = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    closed = {"type": "number", "minimum": 0.001, "exclusiveMaximum": 0.5}
    named = {"properties": {"const": narrow, "exclusiveMinimum": {"type": "string"}}}
    reported = {"properties": {"const": closed, "exclusiveMinimum": {"type": "string"}}, "additionalProperties": False}
    assert prepared(named, "x") == reported
    assert prepared({"anyOf": [narrow, {"items": narrow}]}, "x") == {"anyOf": [closed, {"items": closed}]}
    for same in (
        {"const": narrow},
        {"enum": [narrow], "default": narrow},
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 10**400, "maximum": 0.5},
        {"exclusiveMinimum": "0", "maximum": 0.5},
    ):
        assert prepared(same, "x") == same


A: dict[str, Any] = {"properties": {"a": {"type": "null"}}}
CLOSED = A | {"additionalProperties": False}


def test_a_null_says_nothing_except_as_data():
    """Also where the schema is a promise: some clients send it for what is not there."""
    names = {"type": "object", "properties": {"a": {"const": None}, "b": {"enum": [None], "minLength": None}}}
    expected = {**names, "properties": {"a": {"const": None}, "b": {"enum": [None]}}, "additionalProperties": False}
    assert prepared({**names, "required": None, "items": None}, "x") == expected


def test_objects_are_closed_where_nothing_else_is_said():
    assert prepared(A, "x") == CLOSED
    assert prepared({"items": A, "$defs": {"d": A}}, "x") == {"items": CLOSED, "$defs": {"d": CLOSED}}
    assert prepared({"anyOf": [A, {"type": "null"}]}, "x") == {"anyOf": [CLOSED, {"type": "null"}]}
    assert prepared({"properties": {"additionalProperties": A}}, "x")["properties"]["additionalProperties"] == CLOSED
    for same in (
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "string"}},
        A | {"patternProperties": {"^x": {}}},
        A | {"required": ["undeclared"]},
        A | {"anyOf": [A, A]},
        A | {"$ref": "#/$defs/d"},
        {"allOf": [A, A]},
        {"type": "object"},
        {"properties": {}},
        {"properties": []},
        {"properties": ["a"], "required": "a"},
        {"const": A},
    ):
        assert prepared(same, "x") == same


def test_a_bound_that_cannot_be_moved_is_refused():
    with pytest.raises(InvalidRequest, match="exclusiveMinimum") as caught:
        prepared({"exclusiveMinimum": 2**50, "maximum": 2**50 + 0.5}, "response_format")
    assert caught.value.param == "response_format"
