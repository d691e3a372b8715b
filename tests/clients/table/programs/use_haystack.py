"""Haystack's chat generator and its agent."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from openai import NotFoundError
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
    PERSON,
    WEATHER,
    raises,
    step,
)


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


def generator(model: str = MODEL, **more) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        model=model, api_base_url=OPENAI_URL, api_key=Secret.from_token("none"), max_retries=0, **more
    )


def user(text: str) -> ChatMessage:
    return ChatMessage.from_user(text)


@step("quick start")
def _() -> None:
    assert generator().run([user(ASK_HELLO)])["replies"][0].text == HELLO


@step("streaming")
def _() -> None:
    parts: list[str] = []
    generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run([user(ASK_HELLO)])
    assert "".join(parts) == HELLO


@step("tools")
def _() -> None:
    agent = Agent(chat_generator=generator(), tools=[get_weather])
    agent.warm_up()
    assert agent.run(messages=[user(ASK_WEATHER)])["messages"][-1].text == WEATHER


@step("structured output")
def _() -> None:
    answer = generator(generation_kwargs={"response_format": Person}).run([user(ASK_PERSON)])["replies"][0].text
    assert Person.model_validate_json(answer) == Person(**PERSON)


@step("error")
def _() -> None:
    raises(NotFoundError, lambda: generator("no").run([user("x")]))


@step("second turn")
def _() -> None:
    first = generator().run([user(ASK_HELLO)])["replies"][0]
    assert generator().run([user(ASK_HELLO), first, user(ASK_AGAIN)])["replies"][0].text == AGAIN
