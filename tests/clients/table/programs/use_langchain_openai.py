"""LangChain over its openai package, in chat and in responses form, and a LangGraph agent."""

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, WEATHER, raises, step

chat = ChatOpenAI(model=MODEL, base_url=OPENAI_URL, api_key="none", max_retries=0)
responses = ChatOpenAI(model=MODEL, base_url=OPENAI_URL, api_key="none", max_retries=0, use_responses_api=True)


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
    for model in (chat, responses):
        assert model.invoke(ASK_HELLO).text == HELLO


@step("streaming")
def _() -> None:
    for model in (chat, responses):
        assert "".join(chunk.text for chunk in model.stream(ASK_HELLO)) == HELLO


@step("tools")
def _() -> None:
    for model in (chat, responses):
        talk = [HumanMessage(ASK_WEATHER)]
        first = model.bind_tools([get_weather]).invoke(talk)
        assert isinstance(first, AIMessage) and first.tool_calls[0]["args"] == {"city": "Bern"}
        talk += [first, ToolMessage("18 degrees", tool_call_id=first.tool_calls[0]["id"])]
        assert model.bind_tools([get_weather]).invoke(talk).text == WEATHER
        agent = create_agent(model, [get_weather])
        assert agent.invoke({"messages": [HumanMessage(ASK_WEATHER)]})["messages"][-1].text == WEATHER


@step("structured output")
def _() -> None:
    for model in (chat, responses):
        assert model.with_structured_output(Person).invoke(ASK_PERSON) == Person(name="Ada", age=36)


@step("error")
def _() -> None:
    lost = ChatOpenAI(model="no", base_url=OPENAI_URL, api_key="none", max_retries=0)
    raises(openai.NotFoundError, lambda: lost.invoke("x"))


@step("second turn")
def _() -> None:
    for model in (chat, responses):
        talk = [HumanMessage(ASK_HELLO), model.invoke(ASK_HELLO), HumanMessage(ASK_AGAIN)]
        assert model.invoke(talk).text == AGAIN
