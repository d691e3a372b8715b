"""guidance over its class for OpenAI-like servers."""

from guidance import assistant, gen, models, user
from guidance import json as guided_json
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, HELLO, MODEL, OPENAI_URL, PERSON, raises, step


class Person(BaseModel):
    name: str
    age: int


def lm(name: str = MODEL):
    return models.OpenAI(name, base_url=OPENAI_URL, api_key="none", echo=False, max_retries=0)


@step("quick start")
def _() -> None:
    model = lm()
    with user():
        model += ASK_HELLO
    with assistant():
        model += gen("answer")
    assert model["answer"] == HELLO


@step("structured output")
def _() -> None:
    model = lm()
    with user():
        model += ASK_PERSON
    with assistant():
        model += guided_json(name="answer", schema=Person)
    assert Person.model_validate_json(model["answer"]) == Person(**PERSON)


@step("error")
def _() -> None:
    def ask() -> None:
        model = lm("no")
        with user():
            model += "x"
        with assistant():
            model += gen("answer")

    raises(Exception, ask, "no")


@step("second turn")
def _() -> None:
    model = lm()
    for asked in (ASK_HELLO, ASK_AGAIN):
        with user():
            model += asked
        with assistant():
            model += gen("answer")
    assert model["answer"] == AGAIN
