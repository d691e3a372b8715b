"""What the programs of load generators share: their command run to its end, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 8, 32, 8, 2
_WITHIN_S = 300.0
_BUNDLED = Path(os.environ["TRIPOOL_SOURCE"]) / "checkpoints" / "bundled" / "tiny"


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="client-"))


def tokenizer() -> Path:
    """What a load generator counts with: a real tokenizer, without weights."""
    made = folder()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUNDLED / name, made)
    return made


def run(name: str, *words: object, cwd: Path, **environment: str) -> tuple[int, str]:
    """A program of this environment: its status, and what it printed."""
    command = [str(Path(sys.executable).parent / name), *map(str, words)]
    home = {"HOME": str(cwd), "PWD": str(cwd), "HF_HUB_OFFLINE": "1", **environment}
    ran = subprocess.run(
        command, cwd=cwd, env=os.environ | home, timeout=_WITHIN_S, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return ran.returncode, ran.stdout
