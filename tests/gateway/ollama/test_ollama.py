"""Ollama's API over a scripted engine: the prompts of the chat endpoint, lines of JSON, whole calls, its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.serving import ScriptedEngine
from tripool import __version__
from tripool.grammar.tools import CLOSING, OPENING

HELLO: Any = [{"role": "user", "content": "Which pool?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = f'{OPENING}\n{{"name": "now", "arguments": {{}}}}\n{CLOSING}'


def ask(served: Any, path: str = "/api/chat", **body: Any) -> Any:
    body = ({"model": "fake", "messages": HELLO} if path == "/api/chat" else {"model": "fake"}) | body
    return served.http.post(path, json=body)


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_streams_by_default_what_a_whole_answer_says(serve):
    with serve(engine=ScriptedEngine(f"<think>\nhm é\n</think>\nLet me see.{CALL}\n{CALL}")) as served:
        whole = ask(served, stream=False, tools=[NOW]).json()
        *parts, last = lines(ask(served, tools=[NOW]))
    message = whole["message"]
    assert (message["content"], message["thinking"]) == ("Let me see.", "hm é")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now", "now"]
    assert [part["done"] for part in parts] == [False] * len(parts) and last["done"] is True
    for name in ("content", "thinking"):
        assert "".join(part["message"].get(name, "") for part in parts) == message[name]
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == message["tool_calls"]
    for answer in (whole, last):
        assert answer["done_reason"] == "stop" and answer["eval_count"] > 0 and answer["total_duration"] > 0
    assert whole["prompt_eval_count"] == last["prompt_eval_count"]


def test_prompts_are_those_of_the_chat(server):
    chat: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]  # fmt: skip
    ours: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "now", "content": "noon"},
    ]
    server.openai.chat.completions.create(model="fake", messages=chat, max_tokens=1)
    ask(server, messages=ours, options={"num_predict": 1, "num_ctx": 4096}, keep_alive="5m").raise_for_status()
    assert len({request.prompt_ids for request in server.engine.added}) == 1


def test_generate(server):
    options: Any = {"num_predict": 3, "temperature": 0.5, "top_k": 3, "seed": 1, "repeat_penalty": 1.1, "stop": ["x"]}
    answer = ask(server, "/api/generate", prompt="Hi", system="Be brief.", options=options, stream=False).json()
    assert answer["response"] and (answer["done_reason"], answer["eval_count"]) == ("length", 3)
    raw = ask(server, "/api/generate", prompt="Hi", raw=True, options={"num_predict": 3}, stream=False).json()
    assert raw["prompt_eval_count"] < answer["prompt_eval_count"]
    params = server.engine.added[0].params
    assert (params.temperature, params.top_k, params.seed, params.repetition_penalty) == (0.5, 3, 1, 1.1)
    *parts, _ = lines(ask(server, "/api/generate", prompt="Hi", options={"num_predict": 3}))
    assert "".join(part["response"] for part in parts)


@pytest.mark.parametrize("wanted", ["json", SCHEMA])
def test_formats(server, wanted):
    answer = ask(server, format=wanted, stream=False, options={"num_predict": 300}).json()
    if wanted is SCHEMA:
        Draft202012Validator(SCHEMA).validate(json.loads(answer["message"]["content"]))
    assert answer["message"]["content"].lstrip().startswith("{")


def test_models_and_version(server):
    (model,) = server.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "fake"
    shown = server.http.post("/api/show", json={"model": "fake:latest"}).json()
    assert shown["model_info"]["tripool.context_length"] == 2048 and "tools" in shown["capabilities"]
    assert server.http.get("/api/version").json() == {"version": __version__}
    assert [one["name"] for one in server.http.get("/api/ps").json()["models"]] == ["fake"]


def test_a_body_that_only_loads(server):
    assert ask(server, messages=[]).json()["done_reason"] == "load"
    assert ask(server, "/api/generate").json() | {"created_at": ""} == {
        "model": "fake", "created_at": "", "response": "", "done": True, "done_reason": "load",
    }  # fmt: skip
    assert not server.engine.added


BAD: list[tuple[str, dict[str, Any], int]] = [
    ("/api/chat", {"model": "other"}, 404),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400),
    ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, 400),
    ("/api/chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": [5]}]}, 400),
    ("/api/chat", {"options": {"temprature": 1}}, 400),
    ("/api/chat", {"options": {"temperature": "hot"}}, 400),
    ("/api/chat", {"format": "yaml"}, 400),
    ("/api/chat", {"shape": 1}, 400),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400),
    ("/api/show", {"model": "other"}, 404),
]


@pytest.mark.parametrize(("path", "change", "status"), BAD, ids=lambda value: str(value)[:40])
def test_refusals_have_ollamas_shape(server, path, change, status):
    refused = ask(server, path, **change) if path != "/api/show" else server.http.post(path, json=change)
    assert refused.status_code == status, refused.text
    assert isinstance(refused.json()["error"], str)
    assert not server.engine.added
