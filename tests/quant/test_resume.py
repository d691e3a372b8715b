"""A run that was killed goes on, and what it makes is what an undisturbed run makes, byte for byte."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oracle.cases import CASES
from quant.conftest import windows_of
from tripool.checkpoints import open_checkpoint
from tripool.quant import QuantizeError, Techniques, quantize
from tripool.quant.journal import Journal

CASE = {case.name: case for case in CASES}["v3-groups"]
ALL = Techniques(keep=0.1)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


RUN = """
import json, sys
import torch
from pathlib import Path
from tripool.checkpoints import open_checkpoint
from tripool.quant import Techniques, quantize

torch.set_num_threads(1)
source, target, windows = sys.argv[1:]
with open_checkpoint(source) as checkpoint:
    quantize(
        checkpoint, Path(target), techniques=Techniques(keep=0.1), windows=json.loads(windows),
        on_progress=lambda done, total, what: print(done, what, flush=True),
    )
"""


@pytest.mark.prove
def test_killed_in_the_middle_it_goes_on_and_gives_the_same_bytes(made_of, tmp_path) -> None:
    made = made_of(CASE)
    target = tmp_path / "int8"
    command = [sys.executable, "-c", RUN, str(made.source), str(target), json.dumps(made.windows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("3 "):  # three shards are done, the next is begun
                process.kill()
        assert process.wait() == -9
    assert not (target / "config.json").exists()
    told: list[str] = []
    with open_checkpoint(made.source) as checkpoint:
        done = quantize(
            checkpoint,
            target,
            techniques=ALL,
            windows=made.windows,
            on_progress=lambda done, total, what: told.append(what),
        )
    assert done.resumed >= 3
    assert "rest" not in told and "model.layers.0" not in told, "what was finished is not done again"
    assert done.linears == made.result.linears
    assert digests(target) == digests(made.target)


@pytest.mark.parametrize("step", ["rest", "model.layers.1", "model.layers.3"])
def test_interrupted_at_any_step_the_result_is_the_same(made_of, tmp_path, step: str) -> None:
    """Also a step that the interruption hits before it is noted, and a line that was cut off."""
    made = made_of(CASE)

    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if what == step:
            raise Stop

    with open_checkpoint(made.source) as checkpoint:
        with pytest.raises(Stop):
            quantize(checkpoint, tmp_path / "int8", techniques=ALL, windows=made.windows, on_progress=stop)
        with (tmp_path / "int8" / ".quantize" / "journal.jsonl").open("a") as journal:
            journal.write('{"step": "model.lay')
        quantize(checkpoint, tmp_path / "int8", techniques=ALL, windows=made.windows)
    assert digests(tmp_path / "int8") == digests(made.target)


def test_other_options_do_not_go_on_with_it(folder_of, tmp_path) -> None:
    Journal(tmp_path / "int8", {"techniques": "others"})
    with (
        open_checkpoint(folder_of(CASE)) as checkpoint,
        pytest.raises(QuantizeError, match="started from another") as caught,
    ):
        quantize(checkpoint, tmp_path / "int8", techniques=ALL, windows=windows_of(CASE))
    assert "remove the folder" in caught.value.hint
