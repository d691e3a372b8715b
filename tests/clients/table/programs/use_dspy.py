"""DSPy: predictions, tools, typed outputs, streams."""

import dspy
from pydantic import BaseModel
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, raises, script, step

lm = dspy.LM(f"openai/{MODEL}", api_base=OPENAI_URL, api_key="none", cache=False, num_retries=0, max_tokens=2000)
dspy.configure(lm=lm)


def fields(**values: str) -> str:
    """As DSPy's chat adapter writes them."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()) + "\n\n[[ ## completed ## ]]"


class Person(BaseModel):
    name: str
    age: int


@step("quick start")
def _() -> None:
    assert lm(ASK_HELLO)[0] == HELLO
    script({ASK_HELLO: fields(answer=HELLO)})
    assert dspy.Predict("question -> answer")(question=ASK_HELLO).answer == HELLO


@step("streaming")
async def _() -> None:
    script({ASK_HELLO: fields(answer=HELLO)})
    program = dspy.streamify(dspy.Predict("question -> answer"))
    found = [part async for part in program(question=ASK_HELLO)]
    assert found[-1].answer == HELLO


@step("tools")
def _() -> None:
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "18 degrees"

    first = fields(next_thought="Look.", next_tool_name="get_weather", next_tool_args='{"city": "Bern"}')
    last = fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")
    end = fields(reasoning="It was looked up.", answer="mild")
    script({ASK_WEATHER: first, "18 degrees": last, "Completed.": end})
    assert dspy.ReAct("question -> answer", tools=[get_weather])(question=ASK_WEATHER).answer == "mild"


@step("structured output")
def _() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        script({ASK_PERSON: '{"person": {"name": "Ada", "age": 36}}'})

        class Describe(dspy.Signature):
            """Describe somebody."""

            question: str = dspy.InputField()
            person: Person = dspy.OutputField()

        assert dspy.Predict(Describe)(question=ASK_PERSON).person == Person(name="Ada", age=36)


@step("error")
def _() -> None:
    lost = dspy.LM("openai/no", api_base=OPENAI_URL, api_key="none", cache=False, num_retries=0)
    raises(Exception, lambda: lost("x"), "no")


@step("second turn")
def _() -> None:
    talk = [{"role": "user", "content": ASK_HELLO}, {"role": "assistant", "content": HELLO}]
    assert lm(messages=[*talk, {"role": "user", "content": ASK_AGAIN}])[0] == AGAIN
