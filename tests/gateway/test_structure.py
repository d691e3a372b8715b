"""Structured output over HTTP, in every dialect, and the refusals."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "grün"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
NAMED = {"name": "thing", "schema": SCHEMA}


def is_thing(text: str) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9](\+[0-9])*", text) is not None


def is_code(text: str) -> bool:
    return re.fullmatch(r"[A-Z]{3}-\d", text, re.ASCII) is not None


def is_choice(text: str) -> bool:
    return text in ("oui", "non")


SUM = 'root ::= [0-9] ("+" [0-9])*'
DIALECTS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_thing),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, is_thing),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": False}}}, is_thing),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_thing),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_thing),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"structured_outputs": {"regex": r"[A-Z]{3}-[0-9]"}}, is_code),
    ({"structured_outputs": {"choice": ["oui", "non"]}}, is_choice),
    ({"structured_outputs": {"grammar": SUM}}, is_sum),
    ({"regex": r"[A-Z]{3}-[0-9]"}, is_code),
    ({"ebnf": SUM}, is_sum),
    ({"guided_json": SCHEMA}, is_thing),
    ({"guided_regex": r"[A-Z]{3}-[0-9]"}, is_code),
    ({"guided_choice": ["oui", "non"]}, is_choice),
    ({"guided_grammar": SUM}, is_sum),
]


@pytest.mark.parametrize(("fields", "holds"), DIALECTS, ids=lambda value: json.dumps(value, default=str)[:60])
def test_every_dialect_on_both_endpoints(server, fields, holds):
    chat = server.http.post("/v1/chat/completions", json={"messages": HELLO, "seed": 1, "n": 2} | fields).json()
    plain = server.http.post("/v1/completions", json={"prompt": ["a", "b"], "seed": 2} | fields).json()
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    texts += [choice["text"] for choice in plain["choices"]]
    assert len(texts) == 4
    assert all(map(holds, texts)), texts
    assert {choice["finish_reason"] for choice in (*chat["choices"], *plain["choices"])} == {"stop"}


def test_the_official_client_streams_it(server):
    with server.openai.chat.completions.create(
        model="fake",
        messages=HELLO,
        seed=1,
        stream=True,
        response_format={"type": "json_schema", "json_schema": NAMED},
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert is_thing(text)


def test_a_truncated_answer_says_so(server):
    body = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": NAMED}, "max_tokens": 3}
    (choice,) = server.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_plain_text_is_no_structure(server):
    body = {"messages": HELLO, "response_format": {"type": "text"}, "structured_outputs": {"json_object": False}}
    assert server.http.post("/v1/chat/completions", json=body | {"max_tokens": 2}).status_code == 200
    assert server.engine.added[-1].params.structure is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"mode": 1}}}, "response_format"),
    ({"response_format": {"type": "json_object", "scheme": {}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}, "strict": True}}},
        "response_format",
    ),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 100_000}}, "structured_outputs"),
    ({"regex": "["}, "regex"),
    ({"regex": ""}, "regex"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"ebnf": "root ::= nothing"}, "ebnf"),
    ({"ebnf": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'}, "ebnf"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"structure": {"regex": "a"}}, "structure"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_refusals_name_the_field(server, check_refusal, fields, param):
    for stream in (False, True):
        body = {"messages": HELLO, "stream": stream} | fields
        check_refusal(server.http.post("/v1/chat/completions", json=body), param)
    assert not server.engine.added


def random_json(rng: Random, depth: int = 0) -> Any:
    """Schemas with some of their parts in the wrong place."""
    words = ("type", "properties", "items", "enum", "$ref", "anyOf", "pattern", "minimum", "maxLength", "required", "x")
    values = ("object", "string", "integer", "#/$defs/a", "[", "^a$", -1, 1.5, 10**30, None, True, "", "é")
    kind = rng.choice(("object", "list", "value")) if depth < 4 else "value"
    if kind == "object" or depth == 0:
        return {rng.choice(words): random_json(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    if kind == "list":
        return [random_json(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return rng.choice(values)


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_give_200_or_400(server, seed):
    rng = Random(seed)
    letters = 'ab(|)[]{}*+?\\"^$.,:=~&/%<>0 \n'
    text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 25)))
    fields = rng.choice(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": random_json(rng)}}},
            {"regex": text},
            {"ebnf": f"root ::= {text}"},
            {"ebnf": f"start: {text}"},
        )
    )
    response = server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4, "seed": 1} | fields)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] in fields
    assert server.engine.wait_idle()
