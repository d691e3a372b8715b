"""Tools over HTTP through the official client: calls that a program can rely on, streamed or not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tripool.core import Message
from tripool.engine.fake import fake_text
from tripool.gateway.parse import Parser
from tripool.gateway.tools import as_text
from tripool.text import Tokenizer

HELLO: Any = [{"role": "user", "content": "hello"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "°", "parameters": PARAMETERS}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def check_call(call: Any) -> None:
    assert call.type == "function" and call.id
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        Draft202012Validator(PARAMETERS).validate(arguments)
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("seed", range(5))
def test_required(server, seed):
    answer = server.openai.chat.completions.create(
        model="fake", messages=HELLO, tools=[WEATHER, NOW], tool_choice="required", seed=seed
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check_call(call)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


def test_a_named_function_is_called_once(server):
    for seed in range(4):
        answer = server.openai.chat.completions.create(
            model="fake", messages=HELLO, tools=[NOW, WEATHER], tool_choice=NAMED, seed=seed
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        check_call(call)


def test_one_at_a_time(server):
    for seed in range(6):
        answer = server.openai.chat.completions.create(
            model="fake", messages=HELLO, tools=[NOW], tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(answer.choices[0].message.tool_calls) == 1


def test_auto_may_answer_in_text(server):
    answer = server.openai.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER], seed=1)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert server.engine.added[-1].params.structure.kind == "tool_calls"


def test_none_means_none(server):
    answer = server.openai.chat.completions.create(
        model="fake", messages=HELLO, tools=[WEATHER], tool_choice="none", seed=1
    )
    plain = server.openai.chat.completions.create(model="fake", messages=HELLO, seed=1)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert server.engine.added[0].prompt_ids == server.engine.added[1].prompt_ids


def gathered(stream: Any, n: int) -> list[dict[str, Any]]:
    """A client's view of a stream: id and name first, then pieces of arguments, by index."""
    choices = [{"content": "", "calls": [], "finish_reason": None} for _ in range(n)]
    for chunk in stream:
        (part,) = chunk.choices
        mine = choices[part.index]
        assert mine["finish_reason"] is None
        mine["finish_reason"] = part.finish_reason
        mine["content"] += part.delta.content or ""
        for call in part.delta.tool_calls or []:
            if call.index == len(mine["calls"]):
                assert call.id and call.type == "function" and call.function.name and call.function.arguments == ""
                mine["calls"].append([call.function.name, ""])
            else:
                assert call.index == len(mine["calls"]) - 1
                assert call.id is None and call.function.name is None and call.function.arguments
                mine["calls"][-1][1] += call.function.arguments
    return choices


@pytest.mark.parametrize("seed", range(12))
def test_streams_say_the_same(server, seed):
    choice = ("required", "auto", NAMED)[seed % 3]
    request: dict[str, Any] = {
        "model": "fake",
        "messages": HELLO,
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "seed": seed,
        "n": 2,
        "max_tokens": (None, 30)[seed % 2],
    }
    whole = server.openai.chat.completions.create(**request)
    with server.openai.chat.completions.create(**request, stream=True) as stream:
        streamed = gathered(stream, 2)
    for mine, want in zip(streamed, whole.choices, strict=True):
        assert mine["content"] == (want.message.content or "")
        calls = want.message.tool_calls or []
        assert mine["calls"] == [[call.function.name, call.function.arguments] for call in calls]
        assert mine["finish_reason"] == want.finish_reason
        assert want.finish_reason in ("tool_calls", "length") if choice != "auto" else True


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_inside_a_call_calls_nothing(server, stream):
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "stop": '"city"', "stream": stream}
    text = server.http.post("/v1/chat/completions", json=body).text
    assert '"finish_reason":"stop"' in text
    assert "tool_calls" in text and '"finish_reason":"tool_calls"' not in text


CALLED: Any = [
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 °C"},
    {"role": "user", "content": "Thanks."},
]


def test_a_conversation_goes_on_after_a_call(server):
    answer = server.openai.chat.completions.create(model="fake", messages=CALLED, tools=[WEATHER], seed=1)
    assert answer.choices[0].message.content
    prompt = Tokenizer(server.engine.text).decode(server.engine.added[-1].prompt_ids)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>' in prompt
    assert "sunny, 21 °C" in prompt


def test_templates_without_tools_get_text():
    """The model sees offers, calls and results in the convention that its own calls follow."""
    spoken = [CALLED[0], {"role": "assistant", "content": "One moment.", "tool_calls": _objects(CALLED[1])}, CALLED[2]]
    reported = as_text(spoken, [WEATHER])
    assert [message["role"] for message in reported] == ["system", "user", "assistant", "user"]
    assert json.dumps(WEATHER, ensure_ascii=False) in reported[0]["content"]
    assert reported[2]["content"] == (
        'One moment.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    )
    assert reported[3]["content"] == "<tool_response>\nsunny, 21 °C\n</tool_response>"
    merged = as_text([{"role": "system", "content": "Be kind."}, *spoken], [WEATHER])
    assert merged[0]["content"].startswith("Be kind.\n\n") and len(merged) == 4
    assert as_text([CALLED[0]], []) == [CALLED[0]]


def _objects(message: Message) -> list[dict[str, Any]]:
    return [
        {"function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]


TEMPLATE = (
    "{% for tool in tools or [] %}[offer {{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    " call {{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ ' for ' + m.tool_call_id if m.tool_call_id is defined }}]{% endfor %}"
)


def test_templates_with_tools_get_objects():
    """Templates print arguments themselves, from an object; over HTTP they are a JSON text."""
    tokenizer = Tokenizer(dataclasses.replace(fake_text(), chat_template=TEMPLATE))
    assert tokenizer.knows_tools and not Tokenizer(fake_text()).knows_tools
    job = Parser(tokenizer, "fake").chat(json.dumps({"messages": CALLED, "tools": [NOW]}).encode())
    assert job.calls
    assert tokenizer.decode(job.requests[0].prompt_ids) == (
        f"[offer {json.dumps(NOW)}][user Weather in Bern?]"
        '[assistant None call get_weather{"city": "Bern"}][tool sunny, 21 °C for call_1][user Thanks.]'
    )


def chat_with(call: Any) -> Any:
    return [HELLO[0], {"role": "assistant", "content": None, "tool_calls": call}, HELLO[0]]


GOOD_CALL = CALLED[1]["tool_calls"][0]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": ["x"]}, "tools"),
    ({"tools": [{}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "sp ace"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]}, "tools"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [NOW] * 200}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": 5}, "tool_choice"),
    ({"tools": [NOW], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"tools": [NOW], "regex": "x"}, "regex"),
    ({"messages": chat_with("x")}, "messages"),
    ({"messages": chat_with([{}])}, "messages"),
    ({"messages": chat_with([GOOD_CALL | {"type": "code"}])}, "messages"),
    ({"messages": chat_with([GOOD_CALL | {"id": 5}])}, "messages"),
    ({"messages": chat_with([GOOD_CALL | {"function": {"name": "f", "arguments": 5}}])}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [GOOD_CALL]}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda v: json.dumps(v)[:60])
def test_refusals_name_the_field(server, check_refusal, fields, param):
    check_refusal(server.http.post("/v1/chat/completions", json={"messages": HELLO} | fields), param)
    assert not server.engine.added


def test_completions_have_no_tools(server, check_refusal):
    check_refusal(server.http.post("/v1/completions", json={"prompt": "a", "tools": [NOW]}), "tools")
    plain = {"prompt": "a", "tools": [], "tool_choice": "none", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=plain).status_code == 200
