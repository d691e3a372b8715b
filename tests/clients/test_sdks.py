"""The openai and anthropic SDKs, unmodified, against the served bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

pytestmark = pytest.mark.prove

HELLO = [{"role": "user", "content": "Tell me about a dog."}]
GREEDY = {"temperature": 0}
"""Not among the SDK's own arguments any more, but among the API's."""
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_openai_lists_the_model(client, served):
    assert [model.id for model in client.models.list()] == [served.model]


def test_openai_chat_streams_what_it_answers(client, served):
    asked = {"model": served.model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert 0 <= last.usage.prompt_tokens_details.cached_tokens < last.usage.prompt_tokens


def test_openai_structured_output(client, served):
    schema = {"name": "place", "schema": TOOL | {"additionalProperties": False}, "strict": True}
    answer = client.chat.completions.create(
        model=served.model,
        messages=HELLO,
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    if answer.choices[0].finish_reason == "stop":  # else a tiny model never closed its string: a true answer too
        assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_openai_completions_of_several_prompts(client, served):
    answer = client.completions.create(model=served.model, prompt=["One", "Two"], n=2, max_tokens=5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_openai_errors_are_its_own(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nonsense", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"


def test_anthropic_messages(claude, served):
    answer = claude.messages.create(
        model=served.model, max_tokens=24, messages=HELLO, extra_body=GREEDY, system="Be brief."
    )
    assert answer.role == "assistant"
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 1 <= answer.usage.output_tokens <= 24


def test_anthropic_streams_what_it_answers(claude, served):
    asked = {"model": served.model, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_counts_tokens(claude, served):
    counted = claude.messages.count_tokens(model=served.model, messages=HELLO)
    answer = claude.messages.create(model=served.model, max_tokens=1, messages=HELLO)
    read = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + read


def test_anthropic_must_call_a_tool(claude, served):
    tools = [{"name": "weather", "description": "Of a city.", "input_schema": TOOL}]
    answer = claude.messages.create(
        model=served.model, max_tokens=200, messages=HELLO, tools=tools, tool_choice={"type": "any"}, extra_body=GREEDY
    )
    if answer.stop_reason == "tool_use":  # else the tiny model's string was cut off
        assert answer.content[-1].name == "weather" and isinstance(answer.content[-1].input["city"], str)
    else:
        assert answer.stop_reason == "max_tokens"


def test_anthropic_errors_are_its_own(claude, served):
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=served.model, max_tokens=0, messages=HELLO)
