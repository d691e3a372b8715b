"""Nesting of any depth, and texts of JSON inside of a body: refused by name, at whatever depth recursion would end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.test_extremes import ENDPOINTS, refusal
from tripool.engine.fake import fake_text
from tripool.engine.thread import EngineThread
from tripool.errors import InvalidRequest
from tripool.gateway.body import MAX_DEPTH, decode_json
from tripool.gateway.messages import to_message
from tripool.gateway.models import Models, Served
from tripool.text import Tokenizer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = '{"role": "user", "content": "x"}'
CALL = '{"type": "function", "function": {"name": "f", "arguments": %s}}'
PLACES = {
    "arguments": (CHAT, f'"messages": [{HELLO}, {{"role": "assistant", "tool_calls": [{CALL}]}}]'),
    "description": (
        CHAT,
        f'"messages": [{HELLO}], "tools": [{{"type": "function", "function": {{"name": "f", "description": %s}}}}]',
    ),
    "part": (CHAT, '"messages": [{"role": "user", "content": [{"type": %s}]}]'),
    "kwargs": (CHAT, f'"messages": [{HELLO}], "chat_template_kwargs": {{"a": %s}}'),
    "ignored": (CHAT, f'"messages": [{HELLO}], "metadata": %s'),
    "input": (
        MESSAGES,
        f'"max_tokens": 1, "messages": [{HELLO}, {{"role": "assistant", '
        '"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": %s}}]}]',
    ),
    "tokenize": ("/tokenize", f'"messages": [{HELLO}], "tools": [{{"a": %s}}]'),
}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("place", PLACES)
def test_every_depth_is_a_refusal_and_none_a_mistake_of_ours(place):
    path, body = PLACES[place]
    for depth in (MAX_DEPTH, *range(850, 1000), 100_000):
        value = json.dumps(f'{{"a": {nested(depth)}}}') if place == "arguments" else nested(depth)
        error = refusal(ENDPOINTS[path][1], f"{{{body % value}}}".encode())
        if place == "arguments":  # like other text that is no object: shown as empty
            assert error is None, (depth, error)
            continue
        assert isinstance(error, InvalidRequest), (depth, error)


def test_as_deep_as_allowed_is_fine_and_brackets_in_texts_are_no_depth():
    for depth, wide in ((MAX_DEPTH - 1, 1), (1, 1000)):
        value = decode_json(f'{{"a": [{", ".join([nested(depth - 1) or "0"] * wide)}]}}'.encode())
        assert len(value["a"]) == wide
    assert decode_json(json.dumps({"a": "[{" * 1000}).encode()) == {"a": "[{" * 1000}
    with pytest.raises(InvalidRequest, match="more than 64 levels"):
        decode_json(f'{{"a": {nested(MAX_DEPTH)}}}'.encode())


@pytest.mark.parametrize("arguments", ["NaN", "1e999", '"\\ud800"', "-Infinity", "1" * 4301], ids=lambda text: text[:9])
def test_arguments_that_are_no_json_are_shown_as_empty(server, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": {arguments}}}'}}
    messages: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert server.http.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200
    assert to_message(messages[1], "")["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_templates_name_may_be_any(server, path):
    body = {"messages": [{"role": "user", "content": "x"}]} | ({"max_tokens": 1} if path == CHAT else {})
    for name in ("self", "names", "context", "caller", ""):
        answer = server.http.post(path, json=body | {"chat_template_kwargs": {name: 1}})
        assert answer.status_code == 200, (name, answer.text)


def test_whose_body_it_is_can_be_asked_of_any_body():
    engine, tokenizer = EngineThread.__new__(EngineThread), Tokenizer(fake_text())
    models = Models([Served(name, engine, tokenizer) for name in ("one", "two")])
    for depth in (10, 900, 1000, 100_000):
        assert models.meant_by(f'{{"a": {nested(depth)}}}'.encode()) is models.default
