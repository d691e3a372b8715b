"""LangChain over its anthropic package."""

import anthropic
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from steps import (
    AGAIN,
    ASK_AGAIN,
    ASK_HELLO,
    ASK_PERSON,
    ASK_WEATHER,
    HELLO,
    MODEL,
    URL,
    WEATHER,
    call,
    raises,
    script,
    step,
)

chat = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=500)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


@step("quick start")
def _() -> None:
    assert chat.invoke(ASK_HELLO).text == HELLO


@step("streaming")
def _() -> None:
    assert "".join(chunk.text for chunk in chat.stream(ASK_HELLO)) == HELLO


@step("tools")
def _() -> None:
    agent = create_agent(chat, [get_weather])
    assert agent.invoke({"messages": [HumanMessage(ASK_WEATHER)]})["messages"][-1].text == WEATHER


@step("structured output")
def _() -> None:
    assert chat.with_structured_output(Person, method="json_schema").invoke(ASK_PERSON).age == 36
    script({ASK_PERSON: call("Person", name="Ada", age=36)})
    assert chat.with_structured_output(Person).invoke(ASK_PERSON) == Person(name="Ada", age=36)


@step("error")
def _() -> None:
    lost = ChatAnthropic(model="no", base_url=URL, api_key="none", max_retries=0)
    raises(anthropic.NotFoundError, lambda: lost.invoke("x"))


@step("second turn")
def _() -> None:
    talk = [HumanMessage(ASK_HELLO), chat.invoke(ASK_HELLO), HumanMessage(ASK_AGAIN)]
    assert chat.invoke(talk).text == AGAIN
