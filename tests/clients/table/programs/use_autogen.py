"""AutoGen's assistant agent over its OpenAI client."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
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

INFO = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown",
    "multiple_system_messages": True,
}  # fmt: skip


class Person(BaseModel):
    name: str
    age: int


def client(model: str = MODEL) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=model, base_url=OPENAI_URL, api_key="none", model_info=INFO, max_retries=0)


async def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


@step("quick start")
async def _() -> None:
    answer = await AssistantAgent("assistant", model_client=client()).run(task=ASK_HELLO)
    assert answer.messages[-1].content == HELLO


@step("streaming")
async def _() -> None:
    parts = [part async for part in client().create_stream([UserMessage(content=ASK_HELLO, source="user")])]
    assert "".join(part for part in parts if isinstance(part, str)) == HELLO and parts[-1].content == HELLO


@step("tools")
async def _() -> None:
    agent = AssistantAgent("assistant", model_client=client(), tools=[get_weather], reflect_on_tool_use=True)
    assert (await agent.run(task=ASK_WEATHER)).messages[-1].content == WEATHER


@step("structured output")
async def _() -> None:
    agent = AssistantAgent("assistant", model_client=client(), output_content_type=Person)
    assert (await agent.run(task=ASK_PERSON)).messages[-1].content == Person(**PERSON)


@step("error")
def _() -> None:
    asked = client("no").create([UserMessage(content="x", source="user")])
    raises(NotFoundError, lambda: asyncio.run(asked), "404")


@step("second turn")
async def _() -> None:
    agent = AssistantAgent("assistant", model_client=client())
    await agent.run(task=ASK_HELLO)
    assert (await agent.run(task=ASK_AGAIN)).messages[-1].content == AGAIN
