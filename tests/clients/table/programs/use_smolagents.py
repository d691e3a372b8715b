"""smolagents: its model class, an agent that calls tools, one that writes code."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
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
    call,
    raises,
    script,
    step,
)

model = OpenAIModel(model_id=MODEL, api_base=OPENAI_URL, api_key="none", client_kwargs={"max_retries": 0})


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "18 degrees"


def user(text: str) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


@step("quick start")
def _() -> None:
    assert model([user(ASK_HELLO)]).content == HELLO
    script({ASK_HELLO: f"Thought: greet.\n<code>\nfinal_answer({HELLO!r})\n</code>"})
    assert CodeAgent(tools=[], model=model, verbosity_level=0).run(ASK_HELLO) == HELLO


@step("streaming")
def _() -> None:
    assert "".join(part.content or "" for part in model.generate_stream([user(ASK_HELLO)])) == HELLO


@step("tools")
def _() -> None:
    script({ASK_WEATHER: call("get_weather", city="Bern"), "18 degrees": call("final_answer", answer=WEATHER)})
    agent = ToolCallingAgent(tools=[get_weather], model=model, verbosity_level=0)
    assert agent.run(ASK_WEATHER) == WEATHER


@step("structured output")
def _() -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    import json

    assert json.loads(model.generate([user(ASK_PERSON)], response_format=wanted).content) == PERSON


@step("error")
def _() -> None:
    lost = OpenAIModel(model_id="no", api_base=OPENAI_URL, api_key="none", client_kwargs={"max_retries": 0})
    raises(Exception, lambda: lost([user("x")]), "no")


@step("second turn")
def _() -> None:
    first = {"role": "assistant", "content": [{"type": "text", "text": HELLO}]}
    assert model([user(ASK_HELLO), first, user(ASK_AGAIN)]).content == AGAIN
