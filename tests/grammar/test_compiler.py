"""What compiles means what other tools say it means; what does not is refused with a reason."""

from __future__ import annotations

import json
import re
import threading
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tripool.core import Structure
from tripool.engine.fake import fake_text
from tripool.errors import InvalidRequest
from tripool.grammar import GrammarCompiler
from tripool.grammar import compiler as compiler_module

from .schemas import depth, random_schema


@pytest.mark.parametrize("seed", range(60))
def test_random_walks_are_valid(guide_of, walk, seed):
    """No model at all: whatever the masks allow is valid, says an independent validator."""
    schema = random_schema(Random(seed))
    assert depth(schema) >= 3
    answer = walk(guide_of(Structure("json_schema", schema)), Random(seed))
    Draft202012Validator(schema).validate(json.loads(answer))
    assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", answer)), "spaces between the parts"


FEATURES: list[dict[str, Any]] = [
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "integer", "exclusiveMinimum": -3, "maximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "string", "pattern": "b", "maxLength": 6},
    {"type": "string", "pattern": "^a.c$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "number", "exclusiveMinimum": 34, "exclusiveMaximum": 34.75, "multipleOf": 0.25},
    {"type": "number", "minimum": -41.25, "exclusiveMaximum": -41},
    {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "minProperties": 2,
        "maxProperties": 2,
    },
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}, {"pattern": "^[a-z]*$"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 1, "maximum": 99}]},
    {"$defs": {"leaf": {"enum": ["é", 1]}}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 4},
    {
        "$defs": {"tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}},
        "$ref": "#/$defs/tree",
    },
    {"type": ["integer", "null"], "minimum": 5, "maximum": 5},
    {"properties": {"a": {"type": "boolean"}}, "type": "object", "required": ["b"]},
    {
        "allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}}],
        "type": "object",
    },
    {"const": {"deep": [1, {"ключ": "значение"}]}},
]


@pytest.mark.parametrize("schema", FEATURES, ids=lambda schema: json.dumps(schema)[:60])
def test_one_feature_at_a_time(guide_of, walk, schema):
    for seed in range(8):
        answer = walk(guide_of(Structure("json_schema", schema)), Random(seed))
        Draft202012Validator(schema).validate(json.loads(answer))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "properties": {"a": {"unevaluatedProperties": False}}}, "unevaluatedProperties"),
    ({"type": "string", "format": "haiku"}, "haiku"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "strin"}, "strin"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties|maxProperties"),
    ({"$ref": "https://example.org/schema"}, "example.org"),
    ({"type": "string", "pattern": "(?=look)ahead"}, "look"),
    ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
]


@pytest.mark.parametrize(("schema", "name"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_named(guide_of, schema, name):
    with pytest.raises(InvalidRequest, match=name) as caught:
        guide_of(Structure("json_schema", schema, "response_format"))
    assert caught.value.param == "response_format"


PATTERNS = (
    r"\d{3}-[a-f]{2,4}",
    r"^(cat|dog)s?$",
    r"[^a-z\n]{5}",
    r"(?i)hello( world)?",
    r"\w{1,9}@\w{1,9}\.(com|org)",
    r"[\u4e00-\u9fff]{2}|é{1,3}",
    r"a?b*c+d{2}(e|f)*\.",
    r"\\ \$ \" / \[ \]",
    r"[\w.-]{3}\W\S{2}[^\W\d]\\w",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex_answers_match_whole(guide_of, walk, pattern):
    for seed in range(10):
        answer = walk(guide_of(Structure("regex", pattern)), Random(seed))
        assert re.fullmatch(pattern, answer), answer


def test_choices_are_exact(guide_of, walk):
    choices = ["yes", "no", "perhaps", 'say "é"\n\t\\', "日本🦊", "a.*b", " spaced ", "\x7f\x01"]
    guide_seeds = {walk(guide_of(Structure("choice", choices)), Random(seed)) for seed in range(80)}
    assert guide_seeds == set(choices)


ARITHMETIC = {
    "lark": 'start: sum\nsum: product (("+" | "-") product)*\nproduct: atom ("*" atom)*\n'
    'atom: /[1-9][0-9]{0,2}/ | "(" sum ")"\n',
    "gbnf": 'root ::= product ([-+] product)*\nproduct ::= atom ("*" atom)*\n'
    'atom ::= [1-9] [0-9]? [0-9]? | "(" root ")"\n',
}


@pytest.mark.parametrize("notation", ARITHMETIC)
def test_grammars_of_both_notations(guide_of, walk, notation):
    answers = {walk(guide_of(Structure("ebnf", ARITHMETIC[notation])), Random(seed)) for seed in range(20)}
    assert len(answers) > 10
    for answer in answers:
        assert re.fullmatch(r"[-+*()0-9]+", answer)
        assert isinstance(eval(answer, {"__builtins__": {}}), int)  # digits and operators only: see above


def test_json_object(guide_of, walk):
    for seed in range(10):
        assert isinstance(json.loads(walk(guide_of(Structure("json_object")), Random(seed))), dict)


BAD: list[Structure] = [
    Structure("regex", "["),
    Structure("regex", "a(?=b)"),
    Structure("regex", "(" * 1000),
    Structure("ebnf", "root ::= missing"),
    Structure("ebnf", 'start: "a'),
    Structure("ebnf", "nonsense"),
    Structure("ebnf", "root ::= " + "(" * 20_000),
    Structure("tool_calls", {"functions": []}),
    Structure("tool_calls", {"functions": [{"name": "with space"}]}),
    Structure("tool_calls", {"functions": [{"name": "f"}, {"name": "f"}]}),
    Structure("tool_calls", {"functions": [{"name": "f", "parameters": {"type": "string"}}]}),
    Structure("tool_calls", {"functions": [{"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}]}),
    Structure("tool_calls", {"functions": ["f"], "x": 1}),
]


@pytest.mark.parametrize("structure", BAD, ids=lambda structure: str(structure.value)[:40])
def test_bad_grammars_are_refused(guide_of, structure):
    with pytest.raises(InvalidRequest) as caught:
        guide_of(structure)
    assert caught.value.param == "structure"
    assert len(str(caught.value)) < 1000


def test_random_bytes_are_refused_or_work(guide_of):
    """Nothing but InvalidRequest, whatever a stranger sends."""
    rng = Random(5)
    alphabet = 'ab01()[]{}|*+?^$.\\"/:;,-~&%<>=_ \n\té🦊'
    refused = 0
    for _ in range(300):
        kind = rng.choice(("regex", "ebnf"))
        start = rng.choice(("", "root ::= ", "start: ")) if kind == "ebnf" else ""
        value = start + "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30)))
        try:
            guide_of(Structure(kind, value)).mask()
        except InvalidRequest:
            refused += 1
    assert 50 < refused < 300


def test_equal_structures_are_compiled_once(text, monkeypatch):
    compiled = []

    def spy(structure):
        compiled.append(structure)
        return original(structure)

    original = compiler_module.grammar_text
    monkeypatch.setattr(compiler_module, "grammar_text", spy)
    compiler = GrammarCompiler(text, 8192)
    for _ in range(3):
        compiler.guide(Structure("json_schema", {"type": "null"}), text.end_ids)
    compiler.guide(Structure("json_schema", '{"type":  "null"}', "response_format"), text.end_ids)
    assert len(compiled) == 1
    for number in range(compiler_module.MAX_KEPT):
        compiler.guide(Structure("choice", [str(number)]), text.end_ids)
    compiler.guide(Structure("json_schema", {"type": "null"}), text.end_ids)
    assert len(compiled) == compiler_module.MAX_KEPT + 2
    compiler.guide(Structure("json_schema", {"type": "null"}), text.end_ids, "another tenant")
    assert len(compiled) == compiler_module.MAX_KEPT + 3, "no tenant learns what others have had compiled"


def test_a_vocabulary_without_end_and_words():
    """The fake's: single bytes for most characters, so that every token is part of something."""
    text = fake_text()
    compiler = GrammarCompiler(text, 1000)
    guide = compiler.guide(Structure("choice", ["é", "pool"]), frozenset())
    assert guide.mask().sum() == 2


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[str, Structure]]:
    """What was compiled, and in which thread."""
    seen: list[tuple[str, Structure]] = []
    original = compiler_module.grammar_text

    def spy(structure: Structure) -> str:
        seen.append((threading.current_thread().name, structure))
        return original(structure)

    monkeypatch.setattr(compiler_module, "grammar_text", spy)
    return seen


def test_a_tenants_salts_share_what_was_compiled(text, compiled):
    """Otherwise a salt for each request would have the same grammar compiled for each."""
    compiler = GrammarCompiler(text, 8192)
    for salt in ("", "\x1fone", "\x1fanother"):
        compiler.guide(Structure("regex", "[a-z]+"), text.end_ids, f"tenant{salt}")
    assert len(compiled) == 1


def test_what_was_prepared_is_compiled_elsewhere_and_there_while_it_is_held(text, compiled):
    compiler = GrammarCompiler(text, 8192)
    structures = [Structure("choice", [f"number {i}"]) for i in range(3 * compiler_module.MAX_KEPT)]
    held = [compiler.prepare(structure) for structure in structures]
    assert len({id(compiler.prepare(structures[-1])), id(held[-1])}) == 1 or held[-1].done()
    for future in held:
        future.result(60)
    for structure in structures:
        compiler.guide(structure, text.end_ids).mask()
    assert len(compiled) == len(structures), "each once, though more than are kept"
    assert {name for name, _ in compiled}.isdisjoint({threading.current_thread().name})


def test_the_error_of_a_prepared_grammar_is_raised_by_its_guide(text):
    compiler = GrammarCompiler(text, 8192)
    for structure in (Structure("regex", "[", "regex"), Structure("tool_calls", {"functions": []}, "regex")):
        future = compiler.prepare(structure)
        future.result(60)
        with pytest.raises(InvalidRequest) as caught:
            compiler.guide(structure, text.end_ids)
        assert caught.value.param == "regex"
