"""aider edits a file in a folder of its own, in whole-file and in diff form."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import MODEL, OPENAI_URL, script, step


def aider(folder: str, model: str, *words: str) -> str:
    program = Path(sys.executable).with_name("aider")
    quiet = ("--yes-always", "--no-git", "--no-show-model-warnings", "--no-check-update", "--analytics-disable")
    environment = os.environ | {"OPENAI_API_BASE": OPENAI_URL, "OPENAI_API_KEY": "none", "HOME": folder}
    more = ("--no-detect-urls", "--no-auto-lint", "--map-tokens", "0", "--no-pretty", "--no-gitignore")
    command = [program, "--model", f"openai/{model}", *quiet, *more, *words]
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )
    return ran.stdout + ran.stderr


@step("quick start")
def _() -> None:
    script({"Greet the world": "greet.py\n```\nprint('hello world')\n```\n"})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "greet.py").write_text("print('bye')\n")
        said = aider(folder, MODEL, "--edit-format", "whole", "--no-stream", "--message", "Greet the world", "greet.py")
        assert Path(folder, "greet.py").read_text() == "print('hello world')\n", said


@step("streaming")
def _() -> None:
    edit = "greet.py\n```\n<<<<<<< SEARCH\nprint('bye')\n=======\nprint('hello')\n>>>>>>> REPLACE\n```\n"
    script({"Greet the world": edit})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "greet.py").write_text("print('bye')\n")
        said = aider(folder, MODEL, "--edit-format", "diff", "--message", "Greet the world", "greet.py")
        assert Path(folder, "greet.py").read_text() == "print('hello')\n", said


@step("error")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = aider(folder, "no", "--message", "x")
        assert "no" in said and ("NotFound" in said or "there is no model" in said), said
