"""What popular clients send by themselves is served: their schemas, their histories, their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.serving import Served, WatchedEngine, running_server
from tripool.engine.fake import fake_text
from tripool.engine.scripted import Script, ScriptedTokens
from tripool.gateway import messages, options

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "find", "arguments": {"tags": ["a", "a"]}}\n</tool_call>'
TAGS = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}


class Scripted(WatchedEngine):
    def __init__(self, path: Path) -> None:
        super().__init__(context_tokens=8192)
        self._tokens = ScriptedTokens(fake_text(), Script(path))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("script") / "script.json"
    rules = [
        {"when": "", "answer": "Hello!"},
        {"when": "call it", "answer": CALL},
        {"when": "as JSON", "answer": '{"city": "Bern"}'},
    ]
    path.write_text(json.dumps(rules))
    with running_server(engine=Scripted(path)) as served:
        yield served


def tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "parameters": schema, **more}}


def ask(served: Served, text: str, **body: Any) -> Any:
    return served.http.post(CHAT, json={"messages": [{"role": "user", "content": text}], **body})


def test_a_schema_beyond_the_grammar_is_guided_by_the_rest(scripted):
    answer = ask(scripted, "call it", tools=[tool(TAGS)])
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"tags": ["a", "a"]}
    place = "tools/find/properties/tags/uniqueItems"
    assert answer.headers["x-tripool-unenforced"] == place
    assert answer.json()["tripool"]["unenforced"] == [place]
    streamed = ask(scripted, "call it", tools=[tool(TAGS)], stream=True)
    assert streamed.headers["x-tripool-unenforced"] == place
    assert "x-tripool-unenforced" not in ask(scripted, "hello", tools=[tool({"type": "object"})]).headers


EMPTY = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"]}
"""No value keeps it."""


def test_a_schema_without_any_grammar_is_checked_after(scripted):
    answer = ask(scripted, "call it", tools=[tool(EMPTY)]).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"tags": ["a", "a"]}
    assert answer["tripool"]["unenforced"] == ["tools/find/*"] and answer["tripool"]["checked"]["kept"] is False
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": EMPTY}}
    answer = ask(scripted, "as JSON", response_format=shape).json()
    assert answer["choices"][0]["message"]["content"] == '{"city":"Bern"}'
    assert answer["tripool"]["unenforced"] == ["response_format/*"]
    for promise in ({"tools": [tool(EMPTY, strict=True)]}, {"tools": [tool(EMPTY)], "tool_choice": "required"}):
        assert (
            "required property 'a' is unsatisfiable" in ask(scripted, "call it", **promise).json()["error"]["message"]
        )


def last_chunk(answer: Any) -> Any:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")][
        -1
    ]


def test_what_is_not_enforced_is_checked_after(scripted):
    violated = {"call": 0, "path": "/tags", "schema": "tools/find/properties/tags/uniqueItems"}
    broken = {"kept": False, "violations": [violated]}
    body: dict[str, Any] = {"tools": [tool(TAGS)]}
    assert ask(scripted, "call it", **body).json()["tripool"]["checked"] == broken
    last = last_chunk(ask(scripted, "call it", stream=True, **body))
    assert last["tripool"]["checked"] == broken and last["choices"][0]["finish_reason"] == "tool_calls"
    last = last_chunk(ask(scripted, "call it", stream=True, stream_options={"include_usage": True}, **body))
    assert last["tripool"]["checked"] == broken and last["usage"]
    assert ask(scripted, "hello", **body).json()["tripool"]["checked"] == {"kept": True}
    cut = ask(scripted, "call it", max_tokens=len(CALL) - 20, **body).json()["tripool"]["checked"]
    assert cut == {"kept": None, "why": "the answer is incomplete"}
    both = ask(scripted, "call it", n=2, **body).json()["tripool"]["checked"]["violations"]
    assert [one["choice"] for one in both] == [0, 1]


@pytest.mark.parametrize(
    ("pattern", "checked"),
    [
        ("^(?!Z)", {"kept": True}),
        (
            "^(?!B)",
            {"kept": False, "violations": [{"path": "/city", "schema": "response_format/properties/city/pattern"}]},
        ),
        # Exponential: the process that checks it is ended.
        (r"^(?!x)((.?){30})*Z$", {"kept": None, "why": "the check takes too long"}),
    ],
)
def test_patterns_are_checked_in_a_process(scripted, pattern, checked):
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": pattern}}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(scripted, "as JSON", response_format=shape).json()["tripool"]["checked"] == checked


def test_other_apis_say_what_was_checked(scripted):
    """Messages in their last delta, Responses and Ollama beside their usage."""
    function = {"name": "find", "parameters": TAGS}
    said = [{"role": "user", "content": "call it"}]
    messages = {"max_tokens": 99, "messages": said, "tools": [{"name": "find", "input_schema": TAGS}]}
    found = [
        scripted.http.post("/v1/messages", json=messages).json(),
        last_chunk_of_messages(scripted.http.post("/v1/messages", json={**messages, "stream": True})),
        scripted.http.post(
            "/v1/responses", json={"input": "call it", "tools": [{"type": "function", **function}]}
        ).json(),
        scripted.http.post(
            "/api/chat", json={"model": "fake", "messages": said, "tools": [tool(TAGS)], "stream": False}
        ).json(),
    ]
    assert [one["tripool"]["checked"]["kept"] for one in found] == [False] * 4


def last_chunk_of_messages(answer: Any) -> Any:
    (delta,) = [json.loads(one.removeprefix("data: ")) for one in answer.text.splitlines() if '"message_delta"' in one]
    return delta


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [tool(TAGS, strict=True)]},
        {"tools": [tool(TAGS)], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": TAGS, "strict": True}}},
        {"guided_json": TAGS},
    ],
)
def test_a_promise_is_refused_in_words(scripted, body):
    answer = ask(scripted, "call it", **body)
    assert answer.status_code == 400
    assert re.search("no grammar can promise 'uniqueItems'$", answer.json()["error"]["message"]), answer.text


def test_names_in_the_header_are_the_clients(scripted):
    odd = {"type": "object", "properties": {"a\r\nx: ü": {"type": "string", "format": "path"}}}
    answer = ask(scripted, "hello", tools=[tool(odd)])
    assert answer.headers["x-tripool-unenforced"] == "tools/find/properties/a%0D%0Ax%3A %C3%BC/format"


def test_calls_or_the_format(scripted):
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    both = {
        "tools": [tool(TAGS)],
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": city}},
    }
    called = ask(scripted, "call it", **both).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    answered = ask(scripted, "as JSON", **both).json()["choices"][0]
    assert answered["finish_reason"] == "stop" and answered["message"]["content"] == '{"city":"Bern"}'
    guided = ask(scripted, "hello", max_tokens=60, **both).json()["choices"][0]["message"]
    assert guided.get("tool_calls") or guided["content"].startswith('{"city":"'), "neither a call nor the format"
    loose = ask(scripted, "as JSON", tools=[tool(TAGS)], response_format={"type": "json_object"})
    assert loose.json()["choices"][0]["message"]["content"] == '{"city":"Bern"}'


def test_a_call_cut_early_shows_no_tag(scripted):
    for max_tokens in range(1, len(CALL), 3):  # a token is a byte here
        body = {"tools": [tool(TAGS)], "max_tokens": max_tokens}
        message = ask(scripted, "call it", **body).json()["choices"][0]["message"]
        assert "<tool" not in (message["content"] or "")
        again = [*HELLO, message, *HELLO]
        assert scripted.http.post(CHAT, json={"messages": again, "max_tokens": 1}).status_code == 200, message


HISTORY: list[dict[str, Any]] = [
    {"role": "assistant", "content": "x", **{name: {"any": 1} for name in sorted(messages.IGNORED)}},
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": None, "refusal": "I cannot."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
    {"role": "assistant", "content": "x", "unheard_of": None},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": "18"},
    {"role": "tool", "tool_call_id": "c", "content": None},
    *(
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
        for arguments in ('{"', "null", "", "[1]", None, {"a": 1}, "NaN", "[" * 100)
    ),
]


@pytest.mark.parametrize("message", HISTORY, ids=lambda message: json.dumps(message)[:60])
def test_history_as_clients_send_it_back(server, message):
    answer = server.http.post(CHAT, json={"messages": [*HELLO, message, *HELLO], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_an_unknown_field_of_a_message_is_still_refused(server, check_refusal):
    said = [*HELLO, {"role": "assistant", "content": "x", "contnet": "y"}]
    check_refusal(server.http.post(CHAT, json={"messages": said}), "messages")


SERVED: list[dict[str, Any]] = [
    {"unheard_of": None, "suffix": None, "tools": None},
    {"tools": [{"type": "function", "function": {"name": "server.example/" + "x" * 100}}], "max_tokens": 9},
    {"thinking": {"type": "disabled"}},
    {"thinking": True, "enable_thinking": False},
    {"reasoning": {"effort": "low", "enabled": True, "exclude": False}},
    {"add_special_tokens": True},
    {"response_format": {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}}},
    {"logprobs": True, "return_tokens_as_token_ids": True},
    {"vllm_xargs": {"a": 1}, "stream_interval": 4, "media_io_kwargs": {}, "ec_transfer_params": {}},
]


@pytest.mark.parametrize("body", SERVED, ids=lambda body: json.dumps(body)[:60])
def test_parameters_that_vllm_serves(server, body):
    answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    if "logprobs" in body:
        names = [token["token"] for token in answer.json()["choices"][0]["logprobs"]["content"]]
        assert names == [f"token_id:{i}" for i in map(int, (name.partition(":")[2] for name in names))]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "cache_salt": "x", "chat_template_kwargs": {"enable_thinking": True},
                          "thinking": {"type": "disabled"}, "vllm_xargs": {}}),
        ("/v1/responses", {"input": "hello", "structured_outputs": {"choice": ["yes"]}, "session_id": "x",
                           "include_stop_str_in_output": True, "enable_response_messages": False}),
    ],
)  # fmt: skip
def test_what_vllm_serves_beside_chats(server, path, body):
    lengths = {"max_tokens": 9} if path == "/v1/messages" else {"max_output_tokens": 9}
    answer = server.http.post(path, json={**body, **lengths})
    assert answer.status_code == 200, answer.text
    if "structured_outputs" in body:
        assert answer.json()["output"][0]["content"][0]["text"] == "yes"


def test_only_allowed_tools_are_called(scripted):
    now = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = ask(scripted, "call it", tools=[tool(TAGS), now], tool_choice=choice).json()["choices"][0]["message"]
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"now"}


def test_a_context_error_that_clients_know(server):
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
    ):
        error = server.http.post(path, json=body).json()["error"]
        assert "this model's maximum context length is 2048 tokens" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_the_page_lists_what_is_ignored_in_messages():
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text("utf-8")
    told = page.split("In any message these are ignored:")[1].split("Other unknown fields")[0]
    assert set(re.findall(r"`(\w+)`", told)) == messages.IGNORED
    assert not messages.IGNORED & set(options.CHAT.required)
