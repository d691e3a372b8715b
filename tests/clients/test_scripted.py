"""The scripted server, in one process and split: every surface says what the script says, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from .scripted import Scripted, call, scripted_server

TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
SCRIPT = [
    {"when": "", "answer": "Hello!"},
    {"when": "two", "answer": ["one", "two"]},
    {"when": "in Bern", "answer": call("weather", city="Bern", days=2)},
    {"when": "18 degrees", "answer": "<think>\nMild.\n</think>\nIt is mild."},
    {"when": "as JSON", "answer": '{"city": "Bern", "days": 2}'},
]


@pytest.fixture(scope="module", params=["colocated", pytest.param("split", marks=pytest.mark.prove)])
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with scripted_server(SCRIPT, split=request.param == "split") as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(text: str, **options):
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **options}


def test_the_last_match_answers(client):
    assert client.chat.completions.create(**asked("Anything")).choices[0].message.content == "Hello!"
    answer = client.chat.completions.create(**asked("two", n=3))
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "one"]
    streamed = client.chat.completions.create(**asked("Anything", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Hello!"


def test_a_tool_is_called_and_its_result_answered(client):
    first = client.chat.completions.create(**asked("The weather in Bern?", tools=TOOLS)).choices[0]
    assert first.finish_reason == "tool_calls"
    (made,) = first.message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Bern", "days": 2}
    messages = [
        {"role": "user", "content": "The weather in Bern?"},
        first.message.to_dict(),
        {"role": "tool", "tool_call_id": made.id, "content": "18 degrees"},
    ]
    second = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS).choices[0]
    assert (second.message.content, second.message.reasoning_content) == ("It is mild.", "Mild.")


def test_json_takes_the_spaces_of_its_grammar(client):
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": TOOL}}
    answer = client.chat.completions.create(**asked("as JSON", response_format=schema))
    assert answer.choices[0].message.content == '{"city":"Bern","days":2}'


def test_the_script_changes_between_requests(scripted, client):
    scripted.script([{"when": "", "answer": "Something else."}])
    try:
        assert client.chat.completions.create(**asked("as JSON")).choices[0].message.content == "Something else."
    finally:
        scripted.script(SCRIPT)


def test_an_answer_that_may_not_end_goes_on(scripted):
    body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    answer = httpx.post(f"{scripted.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"].startswith("Hello!") and answer["usage"]["completion_tokens"] == 40


def test_a_prompt_is_scored(scripted):
    body = {"prompt": [40, 50, 60], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{scripted.url}/v1/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -50 / 64, -60 / 64]
    assert choice["prompt_logprobs"][1]["50"]["logprob"] == -50 / 64
