"""instructor in its modes: tools (the default), JSON schema, JSON, and over the anthropic package's tools."""

import instructor
import openai
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, HELLO, MODEL, OPENAI_URL, PERSON, call, raises, script, step

raw = openai.OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@step("quick start")
def _() -> None:
    script({ASK_PERSON: call("Person", **PERSON)})
    client = instructor.from_openai(raw)
    found = client.chat.completions.create(model=MODEL, response_model=Person, messages=[user(ASK_PERSON)])
    assert found.model_dump() == PERSON


@step("streaming")
def _() -> None:
    script({ASK_PERSON: call("PartialPerson", **PERSON)})
    client = instructor.from_openai(raw)
    parts = list(client.create_partial(model=MODEL, response_model=Person, messages=[user(ASK_PERSON)]))
    assert parts[-1].name == "Ada" and parts[-1].age == 36


@step("tools")
def _() -> None:
    script({ASK_PERSON: call("Person", **PERSON) + "\n" + call("Person", name="Bo", age=3)})
    client = instructor.from_openai(raw, mode=instructor.Mode.PARALLEL_TOOLS)
    from collections.abc import Iterable

    found = client.chat.completions.create(model=MODEL, response_model=Iterable[Person], messages=[user(ASK_PERSON)])
    assert [one.name for one in found] == ["Ada", "Bo"]


@step("structured output")
def _() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON):
        client = instructor.from_openai(raw, mode=mode)
        found = client.chat.completions.create(model=MODEL, response_model=Person, messages=[user(ASK_PERSON)])
        assert found.model_dump() == PERSON, mode


@step("error")
def _() -> None:
    client = instructor.from_openai(raw)
    asked = {"model": "no", "response_model": Person, "messages": [user("x")], "max_retries": 0}
    raises(Exception, lambda: client.chat.completions.create(**asked), "no")


@step("second turn")
def _() -> None:
    client = instructor.from_openai(raw)
    talk = [user(ASK_HELLO), {"role": "assistant", "content": HELLO}, user(ASK_AGAIN)]
    answer = client.chat.completions.create(model=MODEL, response_model=None, messages=talk)
    assert answer.choices[0].message.content == AGAIN
