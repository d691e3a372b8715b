"""openai-agents: responses (its default) and chat completions."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)  # fmt: skip
from openai import AsyncOpenAI, NotFoundError
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

set_tracing_disabled(True)
KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


def agent(kind, name: str = MODEL, **more) -> Agent:
    client = AsyncOpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0)
    return Agent(name="Assistant", instructions="You are helpful.", model=kind(name, client), **more)


@step("quick start")
def _() -> None:
    for kind in KINDS:
        assert Runner.run_sync(agent(kind), ASK_HELLO).final_output == HELLO


@step("streaming")
async def _() -> None:
    for kind in KINDS:
        text = ""
        async for event in Runner.run_streamed(agent(kind), ASK_HELLO).stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text == HELLO


@step("tools")
def _() -> None:
    for kind in KINDS:
        assert Runner.run_sync(agent(kind, tools=[get_weather]), ASK_WEATHER).final_output == WEATHER


@step("structured output")
def _() -> None:
    for kind in KINDS:
        assert Runner.run_sync(agent(kind, output_type=Person), ASK_PERSON).final_output == Person(**PERSON)
        typed = agent(kind, output_type=Person, tools=[get_weather])
        assert Runner.run_sync(typed, ASK_PERSON).final_output == Person(**PERSON)


@step("error")
def _() -> None:
    for kind in KINDS:
        raises(NotFoundError, lambda kind=kind: Runner.run_sync(agent(kind, "no"), "x"))


@step("second turn")
def _() -> None:
    for kind in KINDS:
        session = SQLiteSession(kind.__name__)
        assert Runner.run_sync(agent(kind), ASK_HELLO, session=session).final_output == HELLO
        assert Runner.run_sync(agent(kind), ASK_AGAIN, session=session).final_output == AGAIN
