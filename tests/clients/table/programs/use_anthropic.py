"""The anthropic package: messages, streams, tools, token counts."""

import anthropic
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, URL, WEATHER, raises, step

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOL = {
    "name": "get_weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Person(BaseModel):
    name: str
    age: int


def ask(messages, **more):
    return client.messages.create(model=MODEL, max_tokens=500, messages=messages, **more)


def user(content) -> dict:
    return {"role": "user", "content": content}


@step("quick start")
def _() -> None:
    answer = ask([user(ASK_HELLO)], system="Be brief.")
    assert answer.content[0].text == HELLO and answer.stop_reason == "end_turn"
    assert client.messages.count_tokens(model=MODEL, messages=[user(ASK_HELLO)]).input_tokens > 0


@step("streaming")
def _() -> None:
    with client.messages.stream(model=MODEL, max_tokens=500, messages=[user(ASK_HELLO)]) as stream:
        assert "".join(stream.text_stream) == HELLO


@step("tools")
def _() -> None:
    first = ask([user(ASK_WEATHER)], tools=[TOOL])
    made = next(block for block in first.content if block.type == "tool_use")
    assert made.input == {"city": "Bern"} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "18 degrees"}
    talk = [user(ASK_WEATHER), {"role": "assistant", "content": first.content}, user([result])]
    assert ask(talk, tools=[TOOL]).content[0].text == WEATHER


@step("structured output")
def _() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=500, messages=[user(ASK_PERSON)], output_format=Person)
    assert answer.parsed_output == Person(name="Ada", age=36)


@step("error")
def _() -> None:
    raises(anthropic.NotFoundError, lambda: client.messages.create(model="no", max_tokens=5, messages=[user("x")]))
    raises(anthropic.BadRequestError, lambda: client.messages.create(model=MODEL, max_tokens=0, messages=[user("x")]))


@step("second turn")
def _() -> None:
    first = ask([user([{"type": "text", "text": ASK_HELLO, "cache_control": {"type": "ephemeral"}}])])
    talk = [user(ASK_HELLO), {"role": "assistant", "content": first.content}, user(ASK_AGAIN)]
    assert ask(talk).content[0].text == AGAIN
