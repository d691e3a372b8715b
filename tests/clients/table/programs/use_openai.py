"""The openai package: chat completions, responses, completions."""

import json

import openai
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, WEATHER, raises, step

client = openai.OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@step("quick start")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[user(ASK_HELLO)])
    assert answer.choices[0].message.content == HELLO and answer.choices[0].finish_reason == "stop"
    answer = client.responses.create(model=MODEL, input=ASK_HELLO, instructions="Be brief.")
    assert answer.output_text == HELLO and answer.status == "completed"


@step("streaming")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=[user(ASK_HELLO)]) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == HELLO
    with client.responses.stream(model=MODEL, input=ASK_HELLO) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == HELLO
        assert stream.get_final_response().usage.output_tokens > 0


@step("tools")
def _() -> None:
    asked = [user(ASK_WEATHER)]
    message = client.chat.completions.create(model=MODEL, messages=asked, tools=[TOOL]).choices[0].message
    made = message.tool_calls[0]
    assert made.function.name == "get_weather" and json.loads(made.function.arguments) == {"city": "Bern"}
    asked += [message, {"role": "tool", "tool_call_id": made.id, "content": "18 degrees"}]
    answer = client.chat.completions.create(model=MODEL, messages=asked, tools=[TOOL])
    assert answer.choices[0].message.content == WEATHER
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
    first = client.responses.create(model=MODEL, input=ASK_WEATHER, tools=[tool])
    made = next(item for item in first.output if item.type == "function_call")
    assert json.loads(made.arguments) == {"city": "Bern"}
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "18 degrees"}
    again = client.responses.create(model=MODEL, input=[user(ASK_WEATHER), *first.output, result], tools=[tool])
    assert again.output_text == WEATHER


@step("structured output")
def _() -> None:
    asked = [user(ASK_PERSON)]
    answer = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert client.responses.parse(model=MODEL, input=ASK_PERSON, text_format=Person).output_parsed.name == "Ada"


@step("error")
def _() -> None:
    raises(openai.NotFoundError, lambda: client.chat.completions.create(model="no", messages=[user("x")]), "no")
    raises(openai.NotFoundError, lambda: client.responses.create(model="no", input="x"))
    huge = {"model": MODEL, "messages": [user("x" * 1_200_000)]}
    raises(openai.BadRequestError, lambda: client.chat.completions.create(**huge), "maximum context length")


@step("second turn")
def _() -> None:
    first = client.chat.completions.create(model=MODEL, messages=[user(ASK_HELLO)])
    talk = [user(ASK_HELLO), first.choices[0].message, user(ASK_AGAIN)]
    assert client.chat.completions.create(model=MODEL, messages=talk).choices[0].message.content == AGAIN
    first = client.responses.create(model=MODEL, input=ASK_HELLO)
    second = client.responses.create(model=MODEL, input=[user(ASK_HELLO), *first.output, user(ASK_AGAIN)])
    assert second.output_text == AGAIN
