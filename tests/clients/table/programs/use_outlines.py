"""outlines over OpenAI's client, and over its class for vLLM servers."""

import json
from typing import Literal

import openai
import outlines
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, HELLO, MODEL, OPENAI_URL, PERSON, raises, script, step

client = openai.OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0)
models = (outlines.from_openai(client, MODEL), outlines.from_vllm(client, MODEL))


class Person(BaseModel):
    name: str
    age: int


@step("quick start")
def _() -> None:
    for model in models:
        assert model(ASK_HELLO) == HELLO


@step("streaming")
def _() -> None:
    for model in models:
        assert "".join(model.stream(ASK_HELLO)) == HELLO


@step("structured output")
def _() -> None:
    for model in models:
        assert json.loads(model(ASK_PERSON, Person)) == PERSON
    script({"Which": "tea"})
    assert models[1]("Which?", Literal["tea", "coffee"]) == "tea"
    script({"Which": "4711"})
    assert models[1]("Which?", outlines.types.Regex("[0-9]{4}")) == "4711"


@step("error")
def _() -> None:
    raises(Exception, lambda: outlines.from_openai(client, "no")("x"), "no")


@step("second turn")
def _() -> None:
    talk = [{"role": "user", "content": ASK_HELLO}, {"role": "assistant", "content": HELLO}]
    assert models[0](outlines.inputs.Chat([*talk, {"role": "user", "content": ASK_AGAIN}])) == AGAIN
