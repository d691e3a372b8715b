"""The bundled model behind `tripool serve`, as a process of its own, for clients that nobody here wrote.

Run by hand with `pytest -m prove tests/clients`. What is not installed is skipped with the command that installs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tripool

REPO = Path(__file__).resolve().parents[2]
START_WITHIN_S, RUN_WITHIN_S = 120.0, 300.0


@dataclass(frozen=True)
class Served:
    url: str
    model: str


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    yield from serving("tiny")


def serving(*words: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "tripool", "serve", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(START_WITHIN_S, process.kill)
        watchdog.start()
        banner = ""
        while (found := re.search(r"serves (\S+) at (\S+?)/v1", banner)) is None:
            line = process.stdout.readline()
            assert line, f"no server within {START_WITHIN_S:g} s: {banner}"
            banner += line
        watchdog.cancel()
        yield Served(found[2], found[1])
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What load generators count with: the bundled model's own tokenizer, without its weights."""
    bundled = Path(tripool.__file__).parent / "checkpoints" / "bundled" / "tiny"
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return folder


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """Runs a program to its end and returns what it printed; weights and data sets of others are not to be had."""

    def to_the_end(*command: object, folder: Path) -> str:
        words = ["env", "HF_HUB_OFFLINE=1", *map(str, command)]
        with subprocess.Popen(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                printed, _ = process.communicate(timeout=RUN_WITHIN_S)
            finally:
                process.kill()
        assert process.returncode == 0, printed[-3000:]
        return printed

    return to_the_end


def installed(program: Path, how: str) -> Path:
    if not program.exists():
        pytest.skip(f"{program.relative_to(REPO)} is missing: {how}")
    return program
