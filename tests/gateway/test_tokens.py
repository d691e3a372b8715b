"""Tokenize and detokenize in vLLM's shapes: what they say is what the engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which pool? é"}]


def test_a_prompt_and_back(server):
    text = "Once upon a pool, é 🦊"
    told = server.http.post("/tokenize", json={"model": "fake", "prompt": text}).json()
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 2048
    assert told["token_strs"] is None
    back = server.http.post("/detokenize", json={"model": "fake", "tokens": told["tokens"]}).json()
    assert back == {"prompt": text}
    server.openai.completions.create(model="fake", prompt=text, max_tokens=1)
    assert list(server.engine.added[0].prompt_ids) == told["tokens"]


def test_a_chat(server):
    told = server.http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert len(told["token_strs"]) == told["count"]
    assert told["token_strs"][-1] == "<|assistant|>"
    server.openai.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    assert list(server.engine.added[0].prompt_ids) == told["tokens"]
    without = {"messages": HELLO, "add_generation_prompt": False}
    assert server.http.post("/tokenize", json=without).json()["tokens"] == told["tokens"][:-1]


def test_tools_count(server):
    tools = [{"type": "function", "function": {"name": "now"}}]
    plain, with_tools = (
        server.http.post("/tokenize", json={"messages": HELLO, "tools": shown}).json()["count"] for shown in ([], tools)
    )
    server.openai.chat.completions.create(model="fake", messages=HELLO, tools=tools, max_tokens=1)
    assert with_tools == len(server.engine.added[-1].prompt_ids) > plain


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_refusals(server, check_refusal, path, body, param):
    check_refusal(server.http.post(path, json=body), param)


def test_another_model(server):
    assert server.http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404
