"""The command line as a whole: help, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tripool import __version__

LIGHT = """
import sys
from tripool.cli.main import main
try:
    main({argv})
except SystemExit as exited:
    assert exited.code == 0, exited.code
heavy = {{"torch", "fastapi", "uvicorn", "tokenizers", "transformers"}} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["version"]])
def test_help_imports_nothing_heavy(argv):
    done = subprocess.run([sys.executable, "-c", LIGHT.format(argv=argv)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_m(tripool):
    done = subprocess.run([sys.executable, "-m", "tripool", "version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == tripool("version").out == f"tripool {__version__}\n"


def test_an_error_is_one_red_line(tripool):
    ran = tripool("chat", "nonsense", "hello")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: no model 'nonsense' (known names: fake)\n"


def test_wrong_option_values(tripool, models):
    assert tripool("chat", "fake", "hello", "--temperature", "-1").err.startswith("error: temperature is -1.0")
    assert tripool("chat", "fake", "hello", "--tempo", "1").code == 2
    assert tripool("serve", "--max-running", "0").code == 2
    assert tripool("serve", "--kv-gb", "-1").code == 2
    assert not models.loaded
