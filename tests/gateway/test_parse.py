"""Bodies that mean nothing: each gets a 4xx that names the parameter, and nothing reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "hello"}]


def test_wrong_model(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert "this server has 'fake'" in str(caught.value)


def test_unknown_parameter_is_named(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="fake", messages=HELLO, extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    assert "unknown parameter 'temprature'" in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_has_a_status_also_when_streaming(server, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="fake", prompt=["ok", "x" * 5000], stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_prompts_times_choices_are_bounded(server):
    """Each of them takes memory and time before the first token."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="fake", prompt=["a"] * 65, n=16, max_tokens=1)
    assert caught.value.param == "n" and "65 prompts with 16 choices" in str(caught.value)
    assert len(server.openai.completions.create(model="fake", prompt=["a"] * 64, n=16, max_tokens=1).choices) == 1024


BAD_CHAT: list[tuple[Any, str | None]] = [
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
    ({"messages": HELLO, "model": 5}, "model"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "temperature": True}, "temperature"),
    ({"messages": HELLO, "temperature": -1}, "temperature"),
    ({"messages": HELLO, "top_p": 0}, "top_p"),
    ({"messages": HELLO, "top_k": 1.5}, "top_k"),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "n": 10**30}, "n"),
    ({"messages": HELLO, "seed": 2**70}, "seed"),
    ({"messages": HELLO, "seed": 1.5}, "seed"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"messages": HELLO, "stop": 5}, "stop"),
    ({"messages": HELLO, "stop": [""]}, "stop"),
    ({"messages": HELLO, "stop": ["x"] * 100}, "stop"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"1": 1000}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": [1]}, "logit_bias"),
    ({"messages": HELLO, "logprobs": 5}, "logprobs"),
    ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 50}, "logprobs"),
    ({"messages": HELLO, "stream": "yes"}, "stream"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HELLO, "stream": True, "stream_options": {"x": True}}, "stream_options"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    ([], None),
    ("hello", None),
]

BAD_COMPLETION: list[tuple[Any, str | None]] = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["a"] * 1000}, "prompt"),
    ({"prompt": "a", "echo": 0}, "echo"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "messages": HELLO}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD_CHAT, ids=lambda value: json.dumps(value)[:60])
def test_bad_chat_bodies(server, check_refusal, body, param, stream):
    if stream and isinstance(body, dict) and not {"stream", "stream_options"} & body.keys():
        body = body | {"stream": True}
    check_refusal(server.http.post("/v1/chat/completions", json=body), param)
    assert not server.engine.added


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETION, ids=lambda value: json.dumps(value)[:60])
def test_bad_completion_bodies(server, check_refusal, body, param):
    check_refusal(server.http.post("/v1/completions", json=body), param)
    assert not server.engine.added


def test_values_that_ask_for_nothing_are_accepted(server):
    nothing = {
        "response_format": {"type": "text"},
        "tools": [],
        "temperature": None,
        "stop": None,
        "service_tier": "auto",
    }
    body = {"messages": HELLO, "max_tokens": 1} | nothing
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
