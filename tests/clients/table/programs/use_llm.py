"""The program `llm`, with a model named in its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, PERSON, WEATHER, step

FOLDER = tempfile.mkdtemp()
ENTRY = "- model_id: tripool\n  model_name: {}\n  api_base: {}\n  supports_schema: true\n  supports_tools: true\n"
Path(FOLDER, "extra-openai-models.yaml").write_text(
    ENTRY.format(MODEL, OPENAI_URL) + ENTRY.format("no", OPENAI_URL).replace("tripool", "lost")
)
TOOL = "def get_weather(city: str) -> str:\n    'The weather of a city.'\n    return '18 degrees'\n"


def llm(*words: str, fails: bool = False) -> str:
    program = Path(sys.executable).with_name("llm")
    environment = os.environ | {"LLM_USER_PATH": FOLDER, "OPENAI_API_KEY": "none"}
    ran = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=120, stdin=-3)
    assert bool(ran.returncode) == fails, ran.stderr + ran.stdout
    return ran.stderr if fails else ran.stdout.strip()


@step("quick start")
def _() -> None:
    assert llm("-m", "tripool", "--no-stream", ASK_HELLO) == HELLO


@step("streaming")
def _() -> None:
    assert llm("-m", "tripool", ASK_HELLO) == HELLO


@step("tools")
def _() -> None:
    assert llm("-m", "tripool", "--functions", TOOL, ASK_WEATHER).endswith(WEATHER)


@step("structured output")
def _() -> None:
    import json

    assert json.loads(llm("-m", "tripool", "--schema", "name, age int", ASK_PERSON)) == PERSON


@step("error")
def _() -> None:
    assert "no" in llm("-m", "lost", "x", fails=True)


@step("second turn")
def _() -> None:
    assert llm("-m", "tripool", ASK_HELLO) == HELLO
    assert llm("-c", ASK_AGAIN) == AGAIN
