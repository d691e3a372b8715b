"""The Messages dialect through Anthropic's own client, against the Python API over the same deterministic engine."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from jsonschema import Draft202012Validator

from gateway.serving import ScriptedEngine
from tripool.grammar.tools import CLOSING, OPENING

HELLO: Any = [{"role": "user", "content": "Which pool? é"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
WEATHER: Any = {"name": "get_weather", "description": "°", "input_schema": SCHEMA}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


def ask(served: Any, **options: Any) -> Any:
    return served.anthropic.messages.create(**({"model": "fake", "messages": HELLO, "max_tokens": 60} | options))


def test_whole_answer(server):
    message = ask(server, extra_body={"top_k": 3, "temperature": 0.5, "top_p": 0.9})
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert message.id.startswith("msg_")
    (block,) = message.content
    assert block.type == "text" and block.text
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    (request,) = server.engine.added
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(request.prompt_ids)
    params = request.params
    assert (params.top_k, params.temperature, params.top_p, params.max_tokens) == (3, 0.5, 0.9, 60)


def test_the_same_answer_streamed_in_the_right_order(serve):
    with serve(engine=ScriptedEngine("A pool, é. " * 3)) as served:
        whole = ask(served)
        with served.anthropic.messages.stream(model="fake", messages=HELLO, max_tokens=60) as stream:
            events = list(stream)
            final = stream.get_final_message()
        assert final.content[0].text == whole.content[0].text == "A pool, é. " * 3
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
        body = {"model": "fake", "messages": HELLO, "max_tokens": 60, "stream": True}
        with served.http.stream("POST", "/v1/messages", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
    assert events
    names = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in data] == names
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert data[0]["message"]["usage"]["output_tokens"] == 0
    assert data[-2]["tripool"]["timing"]["total"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence(serve, stream):
    with serve(engine=ScriptedEngine("one two three")) as served:
        if stream:
            with served.anthropic.messages.stream(
                model="fake", messages=HELLO, max_tokens=60, stop_sequences=["x", " thr"]
            ) as events:
                message = events.get_final_message()
        else:
            message = ask(served, stop_sequences=["x", " thr"])
        assert message.content[0].text == "one two"
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " thr")


def test_max_tokens(server):
    message = ask(server, max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_cached_input_is_counted_apart(server):
    long: Any = [{"role": "user", "content": "cached words " * 60}]
    first, second = (ask(server, messages=long, max_tokens=1).usage for _ in range(2))
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.cache_read_input_tokens == total // 64 * 64 > 0
    assert second.input_tokens == total - second.cache_read_input_tokens


def test_system_and_blocks_are_what_the_chat_endpoint_sees(server):
    text: Any = [{"type": "text", "text": "Which "}, {"type": "text", "text": "pool?", "cache_control": None}]
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        ask(server, system=system, messages=[{"role": "user", "content": text}], max_tokens=1)
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which pool?"}]
    server.openai.chat.completions.create(model="fake", messages=chat, max_tokens=1)
    prompts = {request.prompt_ids for request in server.engine.added}
    assert len(prompts) == 1


def test_an_assistants_last_words_are_continued(server):
    ask(server, messages=[*HELLO, {"role": "assistant", "content": "The pool"}], max_tokens=1)
    chat: Any = [*HELLO, {"role": "assistant", "content": "The pool"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    server.openai.chat.completions.create(model="fake", messages=chat, max_tokens=1, extra_body=extra)
    ours, theirs = server.engine.added
    assert ours.prompt_ids == theirs.prompt_ids


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools_are_called_and_the_result_goes_back(server, choice):
    message = ask(server, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=400)
    assert message.stop_reason == "tool_use"
    uses = [block for block in message.content if block.type == "tool_use"]
    assert uses and len({use.id for use in uses}) == len(uses)
    for use in uses:
        if use.name == "get_weather":
            Draft202012Validator(SCHEMA).validate(use.input)
    results: Any = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "42"}], "is_error": False}
        for use in uses
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    again = ask(server, messages=turns, tools=[WEATHER, NOW], tool_choice={"type": "none"})
    assert again.content[0].type == "text"


def test_tool_calls_stream_as_they_are(serve):
    script = f'Let me see.{OPENING}\n{{"name": "now", "arguments": {{}}}}\n{CLOSING}'
    script += f'\n{OPENING}\n{{"name": "get_weather", "arguments": {{"city": "Bern", "days": 2}}}}\n{CLOSING}'
    with serve(engine=ScriptedEngine(script)) as served:
        whole = ask(served, tools=[WEATHER, NOW], max_tokens=400)
        with served.anthropic.messages.stream(
            model="fake", messages=HELLO, tools=[WEATHER, NOW], max_tokens=400
        ) as stream:
            final = stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        text, *uses = message.content
        assert text.text == "Let me see."
        assert [(use.name, use.input) for use in uses] == [("now", {}), ("get_weather", {"city": "Bern", "days": 2})]


def test_structured_output(server):
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = ask(server, output_config=config, max_tokens=400)
    Draft202012Validator(SCHEMA).validate(json.loads(message.content[0].text))


def test_count_tokens_is_what_the_engine_gets(server):
    options: Any = {"system": "Be brief.", "tools": [WEATHER], "messages": HELLO}
    counted = server.anthropic.messages.count_tokens(model="fake", **options)
    ask(server, **options, max_tokens=1)
    assert counted.input_tokens == len(server.engine.added[-1].prompt_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": "b"}]}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tools": [{"name": "bad name"}]}, "tools"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"thinking": {"type": "deep"}}, "thinking"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config"),
    ({"output_config": {"verbosity": 1}}, "output_config"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_refusals_have_anthropics_shape(server, change, param):
    body = {"model": "fake", "messages": HELLO, "max_tokens": 10} | change
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    refusal = response.json()
    assert refusal["type"] == "error"
    assert refusal["error"]["type"] == "invalid_request_error"
    assert refusal["error"]["param"] == param
    assert not server.engine.added


def test_typed_errors_of_the_client(server):
    with pytest.raises(anthropic.NotFoundError):
        ask(server, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="unknown parameter"):
        ask(server, extra_body={"temprature": 1})
    assert server.http.get("/v1/messages").json()["type"] == "error"


def test_what_is_ignored_is_ignored(server):
    ignored: Any = {"metadata": {"user_id": "x"}, "service_tier": "auto", "thinking": {"type": "adaptive"}}
    assert ask(server, **ignored, max_tokens=1).content


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_inside_a_stream_is_an_error_event(serve):
    with serve(engine=ScriptedEngine(" pool" * 100_000, context_tokens=10**9)) as served:
        body = {"model": "fake", "messages": HELLO, "max_tokens": 10**6, "stream": True}
        with served.http.stream("POST", "/v1/messages", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            served.engine.fails.set()
            rest = list(lines)
        assert rest[-3] == "event: error"
        assert "RuntimeError" in rest[-2] and "on fire" not in rest[-2]


def test_what_anthropics_newer_clients_send_by_themselves(server):
    ask(server, max_tokens=1)
    more: Any = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": None, "mcp_servers": [], "thread": {"type": "create"}, "compaction": None,
        "output_config": {"effort": None, "task_budget": {"type": "tokens", "total": 5}},
    }  # fmt: skip
    ask(server, max_tokens=1, extra_body=more, extra_headers={"anthropic-beta": "message-threads-2026-08-12"})
    marked: Any = [{"type": "text", "text": HELLO[0]["content"], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    server.anthropic.beta.messages.create(
        model="fake", max_tokens=1, messages=[{"role": "user", "content": marked}], betas=["context-1m-2025-08-07"]
    )
    assert len({request.prompt_ids for request in server.engine.added}) == 1


def test_system_messages_between_others(server):
    brief: Any = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    ask(server, system="Rules.", messages=[brief, *HELLO], max_tokens=1)
    ask(server, system="Rules.\n\nBe brief.", max_tokens=1)
    first, second = server.engine.added
    assert first.prompt_ids == second.prompt_ids
    once = brief | {"clear_at": "next_user_message"}
    ask(server, messages=[*HELLO, once, {"role": "assistant", "content": "Yes."}, *HELLO], max_tokens=1)
    ask(server, messages=[*HELLO, {"role": "assistant", "content": "Yes."}, *HELLO], max_tokens=1)
    ask(server, messages=[*HELLO, once], max_tokens=1)
    *_, cleared, without, shown = server.engine.added
    assert cleared.prompt_ids == without.prompt_ids
    assert len(shown.prompt_ids) > len(second.prompt_ids) - len("Rules.\n\nBe brief.")


def test_a_thread_is_refused_in_the_way_that_makes_clients_send_everything(server):
    thread: Any = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        server.anthropic.beta.messages.create(model="fake", max_tokens=1, messages=HELLO, thread=thread)
    assert refused.value.error_code == "thread_unsupported_request"
    assert not server.engine.added


def test_the_older_name_of_structured_output(server):
    wanted: Any = {"output_format": {"type": "json_schema", "schema": SCHEMA}}
    message = ask(server, extra_body=wanted, max_tokens=400)
    Draft202012Validator(SCHEMA).validate(json.loads(message.content[0].text))
