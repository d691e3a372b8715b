"""The Responses API through OpenAI's own client, over a scripted engine and a real socket."""

from __future__ import annotations

import json
from typing import Annotated, Any

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from gateway.serving import GatedEngine, ScriptedEngine
from tripool.grammar.tools import CLOSING, OPENING
from tripool.text import Tokenizer

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "°", "parameters": SCHEMA, "strict": True}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = f'{OPENING}\n{{"name": "get_weather", "arguments": {{"city": "Bern", "days": 2}}}}\n{CLOSING}'
SCRIPT = f"<think>\nhm, é\n</think>\nLet me see.{CALL}"


def ask(served: Any, **options: Any) -> Any:
    return served.openai.responses.create(**({"model": "fake", "input": "Which pool? é"} | options))


def prompt_of(served: Any) -> str:
    return Tokenizer(served.engine.text).decode(served.engine.added[-1].prompt_ids, skip_special=False)


def events_of(served: Any, **body: Any) -> list[dict[str, Any]]:
    """The raw events of a stream, whose names are their types."""
    body = {"input": "Which pool?", "stream": True} | body
    with served.http.stream("POST", "/v1/responses", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream"), response.read()
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in data] == names
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return data


def test_whole_answer(server):
    answer = ask(server, instructions="Be brief.", max_output_tokens=60, temperature=0.5, metadata={"a": "b"})
    assert (answer.object, answer.status, answer.model, answer.error) == ("response", "completed", "fake", None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.output_text == message.content[0].text
    (request,) = server.engine.added
    assert (request.params.max_tokens, request.params.temperature) == (60, 0.5)
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.to_dict()["store"] is False, "the server says that it stored nothing, although clients ask for it"


def test_the_prompt_is_that_of_the_chat(server):
    chat: Any = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    server.openai.chat.completions.create(model="fake", messages=chat, max_tokens=1)
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
        {"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}]}  # fmt: skip
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, reasoning, said,
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "id": "fc", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    for first in ({"instructions": "Be brief."}, {"input": [{"role": "developer", "content": "Be brief."}, *items]}):
        ask(server, **({"input": items, "max_output_tokens": 1} | first))
    assert len({request.prompt_ids for request in server.engine.added}) == 1


def test_reasoning_comes_back_from_clients_that_keep_only_what_is_sealed(serve):
    with serve(engine=ScriptedEngine("<think>\nhm, é\n</think>\nYes.")) as served:
        answer = ask(served, include=["reasoning.encrypted_content"])
        thought, said = (item.model_dump(exclude_none=True) for item in answer.output)
        assert thought["content"][0]["text"] == "hm, é"
        for kept in (thought, {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}):
            ask(served, input=[{"role": "user", "content": "Hi"}, kept, said, {"role": "user", "content": "So?"}])
        assert "encrypted_content" not in ask(served).output[0].model_dump(exclude_none=True)
        _, whole, sealed, _ = (request.prompt_ids for request in served.engine.added)
    assert whole == sealed


def test_events_in_their_published_order(serve):
    with serve(engine=ScriptedEngine(SCRIPT)) as served:
        whole = ask(served, tools=[WEATHER, NOW]).to_dict()
        events = events_of(served, tools=[WEATHER, NOW])
    names = [event["type"] for event in events if not event["type"].endswith(".delta")]
    text = ["response.content_part.done", "response.output_item.done"]
    assert names == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.done", *text,
        "response.output_item.added", "response.content_part.added", "response.output_text.done", *text,
        "response.output_item.added", "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    last = events[-1]["response"]
    added = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.added"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert [item["id"] for item in done] == [item["id"] for item in added.values()]
    assert {item["status"] for item in added.values()} == {"in_progress"}
    for index, field in enumerate((("content", "reasoning_text"), ("content", "output_text"), ("arguments", ""))):
        deltas = "".join(e["delta"] for e in events if e.get("output_index") == index and "delta" in e)
        assert deltas == (done[index]["content"][0]["text"] if field[1] else done[index]["arguments"])
    assert [_unnamed(item) for item in whole["output"]] == [_unnamed(item) for item in done]
    assert whole["usage"]["output_tokens_details"] == last["usage"]["output_tokens_details"]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert last["tripool"]["timing"]["total"] > 0


def _unnamed(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_the_clients_own_stream_helper(serve):
    with (
        serve(engine=ScriptedEngine(SCRIPT)) as served,
        served.openai.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream,
    ):
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Let me see."
    assert final.output[-1].parsed_arguments == {"city": "Bern", "days": 2}


def test_parsed_into_a_model_of_pydantic(server):
    class Place(BaseModel):
        city: Annotated[str, Field(max_length=10)]
        days: Annotated[int, Field(ge=1, le=9)]

    answer = server.openai.responses.parse(model="fake", input="Hi", text_format=Place, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Place)
    assert answer.output_parsed == Place.model_validate_json(answer.output_text)


def test_structured_text(server):
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    answer = ask(server, text=text, max_output_tokens=400)
    Draft202012Validator(SCHEMA).validate(json.loads(answer.output_text))
    assert answer.text.format.name == "place"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_tools_are_called_and_the_result_goes_back(server, choice):
    first = ask(server, tools=[WEATHER, NOW], tool_choice=choice, max_output_tokens=400)
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and len({call.call_id for call in calls}) == len(calls)
    for call in calls:
        if call.name == "get_weather":
            Draft202012Validator(SCHEMA).validate(json.loads(call.arguments))
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    turns = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output), *results]
    again = ask(server, input=turns, tools=[WEATHER, NOW], tool_choice="none", max_output_tokens=9)
    assert again.output[0].type == "message"


def test_allowed_tools_are_those_that_it_sees(server):
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    answer = ask(server, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=100)
    assert [item.name for item in answer.output] == ["now"]


def test_custom_tools_and_namespaces_go_there_and_back(serve):
    script = f'{OPENING}\n{{"name": "patch", "arguments": {{"input": "a\\nb"}}}}\n{CLOSING}'
    script += f'\n{OPENING}\n{{"name": "files__read", "arguments": {{}}}}\n{CLOSING}'
    read: Any = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "files", "description": "", "tools": [read]},
        {"type": "web_search", "external_web_access": False},
    ]
    with serve(engine=ScriptedEngine(script)) as served:
        answer = ask(served, tools=tools)
        events = events_of(served, tools=tools)
        custom, named = (item.to_dict() for item in answer.output)
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "a\nb")
        assert (named["type"], named["namespace"], named["name"]) == ("function_call", "files", "read")
        inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
        assert [event.get("delta", event.get("input")) for event in inputs] == ["a\nb", "a\nb"]
        results: Any = [
            {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done"},
            {
                "type": "function_call_output",
                "call_id": named["call_id"],
                "output": [{"type": "input_text", "text": "x"}],
            },
        ]
        ask(served, input=[{"role": "user", "content": "Hi"}, custom, named, *results], tools=tools)
        prompt = prompt_of(served)
    assert '"files__read"' in prompt and "web_search" not in prompt and '{"input": "a\\nb"}' in prompt


def test_an_answer_cut_off_is_incomplete(serve):
    with serve(engine=ScriptedEngine("one two three four")) as served:
        answer = ask(served, max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete"
        events = events_of(served, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_logprobs(serve):
    with serve(engine=ScriptedEngine("Yés.")) as served:
        options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        part = ask(served, **options).output[0].content[0]
        events = events_of(served, **options)
    streamed = [score for e in events if e["type"] == "response.output_text.delta" for score in e["logprobs"]]
    shown = [score.to_dict() for score in part.logprobs]
    assert len(shown) >= 4 and {len(score["top_logprobs"]) for score in shown} == {2}
    assert [score["token"] for score in streamed] == [score["token"] for score in shown]


def test_truncation_drops_the_oldest_turns(serve):
    turns: Any = [{"role": "developer", "content": "Rules."}]
    for number in range(12):
        turns += [{"role": "user", "content": f"<{number}>" * 20}, {"role": "assistant", "content": "ok"}]
    turns.append({"role": "user", "content": "last"})
    with serve(engine=ScriptedEngine("Yes.", context_tokens=400)) as served:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(served, input=turns)
        assert refused.value.code == "context_length_exceeded"
        assert ask(served, input=turns, truncation="auto", max_output_tokens=20).output_text == "Yes."
        prompt = prompt_of(served)
        counted = served.openai.responses.input_tokens.count(model="fake", input=turns, truncation="auto")
    assert "Rules." in prompt and "last" in prompt and "<11>" in prompt and "<0>" not in prompt
    assert 0 < counted.input_tokens <= 400


def test_count_is_what_the_engine_gets(server):
    options: Any = {"instructions": "Be brief.", "tools": [WEATHER], "input": "Hi"}
    counted = server.openai.responses.input_tokens.count(model="fake", **options)
    ask(server, **options, max_output_tokens=1)
    assert counted.input_tokens == len(server.engine.added[-1].prompt_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": 5, "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "reasoning", "encrypted_content": "tripool-1.%"}]}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "magic", "name": "x"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"text": {"format": {"type": "yaml"}}}, "response_format"),
    ({"text": {"colour": 1}}, "text"),
    ({"reasoning": {"depth": 1}}, "reasoning"),
    ({"include": ["everything"]}, "include"),
    ({"truncation": "some"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"max_output_tokens": 0}, "max_tokens"),
    ({"shape": 1}, "shape"),
]


@pytest.mark.parametrize(("options", "param"), BAD, ids=lambda value: str(value)[:40])
def test_refused_by_name(server, check_refusal, options, param):
    check_refusal(server.http.post("/v1/responses", json={"input": "x"} | options), param)
    assert not server.engine.added


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_stream_is_its_last_event(serve):
    engine = GatedEngine(free_steps=2)
    with (
        serve(engine=engine) as served,
        served.http.stream(
            "POST", "/v1/responses", json={"input": "x", "stream": True, "ignore_eos": True}
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        engine.fails.set()
        engine.in_flight.set()
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert data[-1]["type"] == "response.failed"
    assert (data[-1]["response"]["status"], data[-1]["response"]["error"]["code"]) == ("failed", "server_error")
