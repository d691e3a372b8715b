"""The ollama package over Ollama's own endpoints."""

import ollama
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, PERSON, URL, WEATHER, raises, step

client = ollama.Client(host=URL)


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "18 degrees"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@step("quick start")
def _() -> None:
    assert MODEL in [model.model.removesuffix(":latest") for model in client.list().models]
    assert client.chat(model=MODEL, messages=[user(ASK_HELLO)]).message.content == HELLO
    assert client.generate(model=MODEL, prompt=ASK_HELLO).response == HELLO


@step("streaming")
def _() -> None:
    parts = client.chat(model=MODEL, messages=[user(ASK_HELLO)], stream=True)
    assert "".join(part.message.content or "" for part in parts) == HELLO


@step("tools")
def _() -> None:
    talk = [user(ASK_WEATHER)]
    message = client.chat(model=MODEL, messages=talk, tools=[get_weather]).message
    assert message.tool_calls[0].function.arguments == {"city": "Bern"}
    talk += [message, {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"}]
    assert client.chat(model=MODEL, messages=talk, tools=[get_weather]).message.content == WEATHER


@step("structured output")
def _() -> None:
    answer = client.chat(model=MODEL, messages=[user(ASK_PERSON)], format=Person.model_json_schema())
    assert Person.model_validate_json(answer.message.content) == Person(**PERSON)


@step("error")
def _() -> None:
    raises(ollama.ResponseError, lambda: client.chat(model="no", messages=[user("x")]), "no")


@step("second turn")
def _() -> None:
    first = client.chat(model=MODEL, messages=[user(ASK_HELLO)]).message
    assert client.chat(model=MODEL, messages=[user(ASK_HELLO), first, user(ASK_AGAIN)]).message.content == AGAIN
