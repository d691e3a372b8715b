"""Tokenize and detokenize in vLLM's shapes: what they say is what the engine gets."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tripool.engine.fake import fake_text
from tripool.text import Tokenizer

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which pool? é"}]


def test_a_prompt_and_back(server):
    text = "Once upon a pool, é 🦊"
    reported = server.http.post("/tokenize", json={"model": "fake", "prompt": text}).json()
    assert reported["count"] == len(reported["tokens"])
    assert reported["max_model_len"] == 2048
    assert reported["token_strs"] is None
    back = server.http.post("/detokenize", json={"model": "fake", "tokens": reported["tokens"]}).json()
    assert back == {"prompt": text}
    server.openai.completions.create(model="fake", prompt=text, max_tokens=1)
    assert list(server.engine.added[0].prompt_ids) == reported["tokens"]


def test_a_chat(server):
    reported = server.http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert len(reported["token_strs"]) == reported["count"]
    assert reported["token_strs"][-1] == "<|assistant|>"
    server.openai.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    assert list(server.engine.added[0].prompt_ids) == reported["tokens"]
    without = {"messages": HELLO, "add_generation_prompt": False}
    assert server.http.post("/tokenize", json=without).json()["tokens"] == reported["tokens"][:-1]


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


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server, check_refusal, monkeypatch):
    """The longest token of this vocabulary has 15 bytes or less, and 2,048 of them fit."""
    encoded = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **more: encoded.append(text) or encode(self, text, **more)
    )
    long = "pool " * 20_000
    messages = [{"role": "user", "content": long}]
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/v1/completions", {"prompt": long}),
        ("/tokenize", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        response = server.http.post(path, json=body)
        check_refusal(response, "prompt" if "prompt" in body else "messages")
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded" and "can fit into 2048 tokens" in error["message"]
    count = server.http.post("/v1/messages/count_tokens", json={"messages": messages})
    assert count.status_code == 400 and count.json()["error"]["code"] == "context_length_exceeded"
    assert not encoded
    assert server.http.post("/tokenize", json={"prompt": long[:60_000]}).json()["count"] > 12_000


def test_ids_without_end_are_refused(server, check_refusal):
    response = server.http.post("/detokenize", json={"tokens": [5] * 20_000})
    check_refusal(response, "tokens")
    assert "at most 16384" in response.json()["error"]["message"]


def test_a_body_too_large_for_any_text_is_not_even_parsed(server, check_refusal):
    response = server.http.post("/tokenize", content=b"{" * 600_000, headers={"content-type": "application/json"})
    check_refusal(response, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_other_threads_run_while_a_text_is_encoded():
    """The library can hold the interpreter's lock for seconds. Then the counter stands still."""
    tokenizer = Tokenizer(fake_text())
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = counted[0]
        ids = tokenizer.encode("pool " * 40_000)
        during = counted[0] - before
        tokenizer.decode(ids)
    finally:
        stop.set()
        counter.join()
    assert during > 1000
