"""LlamaIndex over its class for servers that speak OpenAI's protocol."""

from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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
    call,
    raises,
    script,
    step,
)

OPTIONS = {"api_base": OPENAI_URL, "api_key": "none", "is_chat_model": True, "max_retries": 0}
llm = OpenAILike(model=MODEL, is_function_calling_model=True, should_use_structured_outputs=True, **OPTIONS)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


@step("quick start")
def _() -> None:
    assert llm.chat([user(ASK_HELLO)]).message.content == HELLO
    assert llm.complete(ASK_HELLO).text == HELLO


@step("streaming")
def _() -> None:
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat([user(ASK_HELLO)])) == HELLO


@step("tools")
def _() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    made = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], ASK_WEATHER))
    assert made[0].tool_kwargs == {"city": "Bern"}
    assert "18 degrees" in str(llm.predict_and_call([tool], ASK_WEATHER))


@step("structured output")
def _() -> None:
    assert llm.as_structured_llm(Person).complete(ASK_PERSON).raw == Person(name="Ada", age=36)
    plain = OpenAILike(model=MODEL, is_function_calling_model=True, **OPTIONS)
    script({ASK_PERSON: call("Person", name="Ada", age=36)})
    assert plain.as_structured_llm(Person).complete(ASK_PERSON).raw.age == 36
    script({ASK_PERSON: '{"name": "Ada", "age": 36}'})
    program = LLMTextCompletionProgram.from_defaults(output_cls=Person, llm=llm, prompt_template_str=ASK_PERSON)
    assert program().name == "Ada"


@step("error")
def _() -> None:
    raises(NotFoundError, lambda: OpenAILike(model="no", **OPTIONS).chat([user("x")]))


@step("second turn")
def _() -> None:
    first = llm.chat([user(ASK_HELLO)]).message
    assert llm.chat([user(ASK_HELLO), first, user(ASK_AGAIN)]).message.content == AGAIN
