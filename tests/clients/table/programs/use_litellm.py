"""litellm: its openai provider in chat and responses form, and its anthropic provider."""

import json

import litellm
from pydantic import BaseModel
from steps import (
    AGAIN,
    ASK_AGAIN,
    ASK_HELLO,
    ASK_PERSON,
    ASK_WEATHER,
    HELLO,
    MODEL,
    OPENAI_URL,
    URL,
    WEATHER,
    call,
    raises,
    script,
    step,
)

litellm.telemetry = False
OPENAI = {"model": f"openai/{MODEL}", "api_base": OPENAI_URL, "api_key": "none", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}
VLLM = {"model": f"hosted_vllm/{MODEL}", "api_base": OPENAI_URL, "api_key": "none", "num_retries": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@step("quick start")
def _() -> None:
    for way in (OPENAI, ANTHROPIC, VLLM):
        assert litellm.completion(messages=[user(ASK_HELLO)], **way).choices[0].message.content == HELLO
    answer = litellm.responses(input=ASK_HELLO, **OPENAI)
    assert answer.output[-1].content[0].text == HELLO


@step("streaming")
def _() -> None:
    for way in (OPENAI, ANTHROPIC):
        chunks = litellm.completion(messages=[user(ASK_HELLO)], stream=True, **way)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO


@step("tools")
def _() -> None:
    for way in (OPENAI, ANTHROPIC):
        talk = [user(ASK_WEATHER)]
        message = litellm.completion(messages=talk, tools=[TOOL], **way).choices[0].message
        made = message.tool_calls[0]
        assert json.loads(made.function.arguments) == {"city": "Bern"}
        talk += [message.model_dump(), {"role": "tool", "tool_call_id": made.id, "content": "18 degrees"}]
        assert litellm.completion(messages=talk, tools=[TOOL], **way).choices[0].message.content == WEATHER


@step("structured output")
def _() -> None:
    for way, text in ((OPENAI, None), (ANTHROPIC, call("json_tool_call", name="Ada", age=36))):
        if text:
            script({ASK_PERSON: text})
        answer = litellm.completion(messages=[user(ASK_PERSON)], response_format=Person, **way)
        assert Person.model_validate_json(answer.choices[0].message.content).age == 36


@step("error")
def _() -> None:
    asked = OPENAI | {"messages": [user("x")]}
    raises(litellm.NotFoundError, lambda: litellm.completion(**asked | {"model": "openai/no"}))
    raises(
        litellm.ContextWindowExceededError, lambda: litellm.completion(**asked | {"messages": [user("x" * 1_200_000)]})
    )


@step("second turn")
def _() -> None:
    for way in (OPENAI, ANTHROPIC):
        first = litellm.completion(messages=[user(ASK_HELLO)], **way).choices[0].message
        talk = [user(ASK_HELLO), first.model_dump(), user(ASK_AGAIN)]
        assert litellm.completion(messages=talk, **way).choices[0].message.content == AGAIN
