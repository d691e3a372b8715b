"""pydantic-ai over its three models: responses (its default for openai), chat completions, anthropic."""

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
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
    URL,
    WEATHER,
    call,
    raises,
    script,
    step,
)  # fmt: skip


def models(name: str = MODEL):
    """Fresh ones for each step, which has an event loop of its own."""
    openai = OpenAIProvider(base_url=OPENAI_URL, api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
    return (
        OpenAIResponsesModel(name, provider=openai),
        OpenAIChatModel(name, provider=openai),
        AnthropicModel(name, provider=anthropic),
    )


class Person(BaseModel):
    name: str
    age: int


@step("quick start")
def _() -> None:
    for model in models():
        assert Agent(model, instructions="Be concise.").run_sync(ASK_HELLO).output == HELLO


@step("streaming")
async def _() -> None:
    for model in models():
        async with Agent(model).run_stream(ASK_HELLO) as stream:
            assert "".join([text async for text in stream.stream_text(delta=True)]) == HELLO


@step("tools")
def _() -> None:
    for model in models():
        agent = Agent(model)

        @agent.tool_plain
        def get_weather(city: str) -> str:
            assert city == "Bern"
            return "18 degrees"

        assert agent.run_sync(ASK_WEATHER).output == WEATHER


@step("structured output")
def _() -> None:
    for model in models()[:2]:
        assert Agent(model, output_type=NativeOutput(Person)).run_sync(ASK_PERSON).output == Person(**PERSON)
    script({ASK_PERSON: call("final_result", **PERSON)})
    for model in models():
        assert Agent(model, output_type=Person).run_sync(ASK_PERSON).output == Person(**PERSON)


@step("error")
def _() -> None:
    for model in models("no"):
        raises(ModelHTTPError, lambda model=model: Agent(model).run_sync("x"), "404")


@step("second turn")
def _() -> None:
    for model in models():
        agent = Agent(model)
        first = agent.run_sync(ASK_HELLO)
        assert agent.run_sync(ASK_AGAIN, message_history=first.all_messages()).output == AGAIN
