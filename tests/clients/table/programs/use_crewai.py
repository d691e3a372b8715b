"""CrewAI: its LLM class, and a crew of one agent with a tool."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
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


def llm(model: str = MODEL, **more) -> LLM:
    return LLM(model=f"openai/{model}", base_url=OPENAI_URL, api_key="none", **more)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


@step("quick start")
def _() -> None:
    assert llm().call(ASK_HELLO) == HELLO


@step("streaming")
def _() -> None:
    assert llm(stream=True).call(ASK_HELLO) == HELLO


@step("tools")
def _() -> None:
    agent = Agent(role="Guide", goal="Help.", backstory="Knows the weather.", llm=llm(), tools=[get_weather])
    task = Task(description=ASK_WEATHER, expected_output="One sentence.", agent=agent)
    assert WEATHER in str(Crew(agents=[agent], tasks=[task]).kickoff())


@step("structured output")
def _() -> None:
    found = llm(response_format=Person).call(ASK_PERSON)
    assert (found if isinstance(found, Person) else Person.model_validate_json(found)) == Person(**PERSON)


@step("error")
def _() -> None:
    raises(Exception, lambda: llm("no").call("x"), "no")


@step("second turn")
def _() -> None:
    talk = [{"role": "user", "content": ASK_HELLO}, {"role": "assistant", "content": HELLO}]
    assert llm().call([*talk, {"role": "user", "content": ASK_AGAIN}]) == AGAIN
