"""Whole runs of a small network: what they leave behind, and that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from train.small import small_config, write_documents
from tripool.checkpoints import open_checkpoint
from tripool.models import load_model
from tripool.models.load import arch_of
from tripool.train import state
from tripool.train.attention import MASKED
from tripool.train.config import TrainConfig, TrainError
from tripool.train.learner import Learner
from tripool.train.metrics import read_metrics
from tripool.train.network import Network
from tripool.train.run import prepare, train

STEPS, SAVED = 12, 5


def plan() -> TrainConfig:
    config = small_config(steps=STEPS, rows_per_step=2, rows_per_pass=1, warmup_steps=2, peak_lr=5e-3)
    return replace(config, report=replace(config.report, save_steps=SAVED, eval_steps=6))


RUN = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from train.test_run import plan
from tripool.train.run import train

torch.set_num_threads(1)
train(plan(), Path(sys.argv[2]), Path(sys.argv[3]), tell=lambda line: print(line, flush=True))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "documents", 900)


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    told: list[str] = []
    train(plan(), corpus, out, tell=told.append)
    assert any("tokens/s" in line and "left" in line for line in told)
    assert any(line.startswith(f"{STEPS} steps in ") for line in told)
    return out


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_loss_falls_and_is_told(finished: Path) -> None:
    lines = [line for line in read_metrics(finished) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["mtp_loss"] < lines[0]["mtp_loss"] - 1
    assert lines[-1]["lr"] < lines[STEPS // 2]["lr"]
    assert all(line["load"] >= 1 for line in lines)
    held_out = [line for line in read_metrics(finished) if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [6, STEPS]
    assert held_out[1]["held_out_loss"] < held_out[0]["held_out_loss"]
    drawn = ElementTree.parse(finished / "loss.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(drawn.findall("{*}polyline")) == 2 and len(drawn.findall("{*}circle")) == 2


def test_what_comes_out_can_be_loaded(finished: Path) -> None:
    with open_checkpoint(finished / "model") as checkpoint, torch.inference_mode():
        model = load_model(checkpoint)
        assert model.mtp is not None
        assert checkpoint.text.end_ids == {1}


def test_held_out_documents_are_written_and_not_trained(finished: Path, corpus: Path) -> None:
    held_out = [json.loads(line) for line in (finished / "held_out.jsonl").read_text("utf-8").splitlines()]
    every = [json.loads(line) for line in (corpus / "some.jsonl").read_text("utf-8").splitlines()]
    assert 0 < len(held_out) < len(every) / 50
    assert all(one in every for one in held_out)


@pytest.mark.prove
def test_killed_it_goes_on_to_the_same_weights(finished: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", RUN, str(Path(__file__).parents[1]), str(corpus), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"step {SAVED + 2} "):  # past the state that was saved, and before the next
                process.kill()
        assert process.wait() == -9
    assert not (out / "model").exists()
    with (out / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')
    with pytest.raises(TrainError, match="begun") as caught:
        train(plan(), corpus, out, tell=lambda line: None)
    assert "--resume" in caught.value.hint
    told: list[str] = []
    train(plan(), corpus, out, resume=True, tell=told.append)
    assert f"goes on after step {SAVED}" in told
    assert digests(out / "model") == digests(finished / "model")
    steps = [line["step"] for line in read_metrics(out) if "loss" in line]
    assert steps == list(range(1, STEPS + 1)), "each step is told once"
    losses = [[line["loss"] for line in read_metrics(folder) if "loss" in line] for folder in (out, finished)]
    assert losses[0] == losses[1]


def test_another_config_does_not_go_on_with_it(finished: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / state.FILE).write_bytes((finished / state.FILE).read_bytes())
    other = small_config(steps=STEPS, rows_per_step=2, rows_per_pass=1, warmup_steps=2, peak_lr=6e-3)
    with pytest.raises(TrainError, match="another config"):
        train(other, corpus, tmp_path, resume=True, tell=lambda line: None)


def test_a_vocabulary_that_is_too_small_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = plan()
    with pytest.raises(TrainError, match="is 2000") as caught:
        train(replace(config, model={**config.model, "vocab_size": 2000}), corpus, tmp_path, tell=lambda line: None)
    assert caught.value.key == "model.vocab_size"


def test_with_a_time_limit_the_schedule_follows_the_clock(corpus: Path, tmp_path: Path) -> None:
    """A clock that moves two seconds at each look: the rate is down and the model is there when the time is over."""

    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            self.now_s += 2.0
            return self.now_s

    clock = Clock()
    train(plan(), corpus, tmp_path, minutes=1.0, tell=lambda line: None, clock=clock)
    lines = [line for line in read_metrics(tmp_path) if "loss" in line]
    assert lines[-1]["progress"] == 1.0 and lines[-2]["progress"] < 1.0
    assert lines[-1]["lr"] < 0.3 * max(line["lr"] for line in lines)
    assert clock.now_s < 60
    assert (tmp_path / "model" / "config.json").exists()


def test_rows_in_one_pass_or_several_are_the_same_step(corpus: Path, tmp_path: Path) -> None:
    found = []
    for rows_per_pass in (1, 4):
        config = plan()
        optimise = replace(config.optimise, rows_per_step=4, rows_per_pass=rows_per_pass, steps=2)
        out = tmp_path / str(rows_per_pass)
        train(replace(config, optimise=optimise), corpus, out, tell=lambda line: None)
        found.append([line["loss"] for line in read_metrics(out) if "loss" in line])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_way_that_cannot_be_compiled_is_said_and_not_used(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan()
    prepared = prepare(config, corpus, tmp_path, lambda line: None)
    network = Network(arch_of(config.model, "small"), MASKED.attend, config.data.row_tokens)
    network.begin(0.02, 0)
    learner = Learner(config, network, MASKED, prepared.rows)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._dynamo.optimize", broken)
    monkeypatch.setattr("torch.compile", lambda function, **_: broken)
    told: list[str] = []
    learner.compile(told.append)
    assert told == ["not compiled: RuntimeError: no compiler here"]
    assert learner.step(0, 1e-3, 1e-3).found().loss > 5
