"""What the programs of Python clients share: the server's address, the answers it will give, and a line per step.

The runner sets TRIPOOL_URL, TRIPOOL_MODEL and TRIPOOL_SCRIPT (see `tests/clients/scripted.py`). A step that raises has
failed; the others are still tried.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, MODEL = os.environ["TRIPOOL_URL"], os.environ["TRIPOOL_MODEL"]
OPENAI_URL = f"{URL}/v1"
_SCRIPT = Path(os.environ["TRIPOOL_SCRIPT"])

HELLO, AGAIN = "Hello from Tripool!", "Hello again!"
ASK_HELLO, ASK_AGAIN = "Say hello.", "Say it once more."
ASK_WEATHER, WEATHER = "What is the weather in Bern?", "It is 18 degrees in Bern."
ASK_PERSON, PERSON = "Describe Ada as JSON.", {"name": "Ada", "age": 36}


def answers(**more: str | list[str]) -> None:
    """From now on, prompts that hold a key (underscores are spaces) get its text; the usual ones get the usual."""
    usual: dict[str, str | list[str]] = {
        ASK_HELLO: HELLO,
        ASK_AGAIN: AGAIN,
        ASK_WEATHER: call("get_weather", city="Bern"),
        "18 degrees": WEATHER,
        ASK_PERSON: json.dumps(PERSON),
    }
    rules = usual | {when.replace("_", " "): answer for when, answer in more.items()}
    script(rules)


def script(rules: dict[str, str | list[str]]) -> None:
    fresh = _SCRIPT.with_suffix(".new")
    fresh.write_text(json.dumps([{"when": when, "answer": answer} for when, answer in rules.items()]), "utf-8")
    fresh.replace(_SCRIPT)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def step(name: str) -> Callable[[Callable[[], Any]], None]:
    """Runs the function at once, and prints how it went."""

    def run(function: Callable[[], Any]) -> None:
        answers()
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
            failure = None
        except BaseException as error:  # noqa: BLE001 (printed, and the step has failed)
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"[:500]
        print("STEP " + json.dumps({"step": name, "failure": failure}), flush=True)

    return run


def raises(kind: type[BaseException], function: Callable[[], Any], *words: str) -> None:
    """The client's own error, with the server's words in it."""
    try:
        function()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in {said}"
