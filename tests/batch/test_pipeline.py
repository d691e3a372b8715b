"""A pipeline interrupted anywhere goes on to the same bytes; a failing gate publishes nothing; what is whole stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from batch.pipeline_case import write_case, write_file
from tripool.batch.pipeline import GateFailed, Outcome, PipelineError, Run, read_pipeline
from tripool.checkpoints import Registry, open_checkpoint
from tripool.cli.main import main

SOURCE = '[train]\nconfig = "net.toml"\ndata = "corpus"\n'


def no_server(url: str) -> NoReturn:
    raise AssertionError(url)


def run(file: Path, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    return Run(read_pipeline(file), tell, no_server).run()


def plan(file: Path) -> dict[str, str]:
    return {row.stage: row.state for row in Run(read_pipeline(file), lambda line: None, None).plan().rows}


def contents(outcome: Outcome) -> dict[str, str]:
    return {row.stage: row.artefact.content for row in outcome.rows if row.artefact is not None}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def finished(case: Path, told: list[str]) -> Outcome:
    return run(case, told.append)


def test_it_trains_measures_registers_and_publishes(case: Path, finished: Outcome) -> None:
    assert [row.stage for row in finished.rows] == ["train", "quantize", "eval", "gate", "register", "publish"]
    assert finished.version == finished.published == "story@1"
    registry = Registry(case.parent / "registry")
    version = registry.version("story", 1)
    assert version.content == contents(finished)["quantize"]
    stages = {one["stage"]: one for one in version.lineage["stages"]}
    assert stages["quantize"]["inputs"]["model"] == stages["train"]["content"] == contents(finished)["train"]
    assert version.lineage["figures"].keys() >= {"perplexity", "q.acc", "held_out_perplexity"}
    assert version.lineage["pipeline"]["train"]["data"] == "corpus"
    with open_checkpoint(f"{registry.folder}/story") as checkpoint:
        assert checkpoint.name == "story@1"


def test_what_is_whole_is_not_made_again(case: Path, finished: Outcome) -> None:
    again = run(case)
    assert {row.state for row in again.rows} == {"done", "passed"}
    assert contents(again) == contents(finished)
    assert plan(case) == {row.stage: row.state for row in again.rows}


def test_interrupted_in_and_after_every_stage_it_goes_on_to_the_same_bytes(
    finished: Outcome, told: list[str], tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stopping_at(begin: str) -> Callable[[str], None]:
        def tell(line: str) -> None:
            if line.startswith(begin):
                raise Stop

        return tell

    places = ["step 2", "exported", "train: made", "quantize: 2 of", "quantize: made", "eval: window 1"]
    places += ["eval: made", "register: begins", "register: made", "publish: begins"]
    case = write_case(tmp_path)
    for place in places:
        assert any(line.startswith(place) for line in told), place
        with pytest.raises(Stop):
            run(case, stopping_at(place))
    assert plan(case)["publish"] == "to do"
    whole = run(case)
    assert contents(whole) == contents(finished)
    assert [row.stage for row in whole.rows if row.state == "made"] == ["publish"]
    assert whole.published == "story@1"
    assert len(Registry(tmp_path / "registry").versions("story")) == 1


def test_a_failing_gate_publishes_nothing_and_says_which_bar_was_missed(
    case: Path, finished: Outcome, tmp_path: Path
) -> None:
    gate = 'max = {perplexity_change = -0.9, mean_kl = 100}\nmin = {"q.acc" = 1.1}'
    folder = case.parent
    file = write_file(folder, "failing", source=SOURCE, gate=gate)
    file.write_text(file.read_text("utf-8").replace('"registry"', f'"{tmp_path}/registry"'), "utf-8")
    with pytest.raises(GateFailed) as missed:
        run(file)
    assert "perplexity_change" in missed.value.message and "above -0.9" in missed.value.message
    assert "q.acc" in missed.value.message and "below 1.1" in missed.value.message
    assert "mean_kl" not in missed.value.message
    assert not (tmp_path / "registry").exists()
    assert plan(file)["gate"] == "missed" and plan(file)["publish"] == "to do"


def test_an_artefact_that_was_changed_is_made_again(finished: Outcome, case: Path) -> None:
    (row,) = [row for row in finished.rows if row.stage == "quantize"]
    assert row.artefact is not None
    shard = next((row.artefact.path / row.artefact.output).glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert plan(case)["quantize"] == "to do"
    again = run(case)
    assert {row.stage: row.state for row in again.rows}["quantize"] == "made"
    assert contents(again) == contents(finished)


def test_other_inputs_are_other_artefacts_from_there_on(finished: Outcome, case: Path) -> None:
    file = write_file(case.parent, "other", source=SOURCE, quantize="tokens = 0\nkeep = 0.0")
    states = plan(file)
    assert states["train"] == "done" and states["quantize"] == states["eval"] == "to do"


def test_what_cannot_run_is_refused_before_anything_does(case: Path) -> None:
    good = case.read_text("utf-8")
    for old, new, said in (
        ("[train]", "[trein]", "trein"),
        ('data = "corpus"', "", "data"),
        ("tokens = 96", 'tokens = "96"', "quantize.tokens"),
        ("perplexity_change = 0.5", "perplexitie = 0.5", "not measured"),
        ("[gate]", '[canary]\nurl = "http://x"\nshare = 2\n[gate]', "share"),
        ('name = "story"', 'name = "tiny"', "another model"),
    ):
        assert good.count(old) >= 1
        file = case.with_name("wrong.toml")
        file.write_text(good.replace(old, new), "utf-8")
        with pytest.raises((PipelineError, Exception), match=said) as refused:
            read_pipeline(file)
        assert getattr(refused.value, "status", 0) == 400


def test_two_runs_at_once_are_one_too_many(case: Path, finished: Outcome) -> None:
    def tell(line: str) -> None:
        with pytest.raises(PipelineError, match="another process"):
            run(case)
        assert Run(read_pipeline(case), lambda line: None, None).plan().is_running

    run(case, tell)
    assert not Run(read_pipeline(case), lambda line: None, None).plan().is_running


def test_the_command_shows_what_there_is(case: Path, finished: Outcome, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", str(case), "--status"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "quantize" in out and "registered: story@1; published: story@1" in out
    with pytest.raises(SystemExit):
        main(["models", "history", f"{case.parent}/registry/story", "--format", "json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "story@1" and row["published"]
