"""`tripool serve` with several models: a real process, real weights, one budget, and the model cache between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tripool.checkpoints import locate

DEADLINE_S = 300.0


@pytest.fixture
def other(tmp_path) -> Path:
    """The bundled model under another name."""
    return Path(shutil.copytree(locate("tiny"), tmp_path / "other"))


class Running:
    def __init__(self, process: subprocess.Popen[str], url: str, banner: str) -> None:
        self.process, self.banner = process, banner
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S)
        self.url = url

    def say(self, model: str, **more) -> dict:
        body = {"model": model, "prompt": "Once upon", "max_tokens": 12, "temperature": 0} | more
        return self.http.post("/v1/completions", json=body).json()

    def models(self) -> dict[str, dict]:
        return {model["id"]: model for model in self.http.get("/v1/models").json()["data"]}

    def loaded_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start(*arguments: str, command: list[str] | None = None) -> Iterator[Running]:
    command = command or [sys.executable, "-m", "tripool", "serve", *arguments, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        banner = ""
        while "Ctrl-C" not in banner:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            banner += line
        running = Running(process, re.search(r"http://\S+(?=/v1)", banner)[0], banner)
        with running.http:
            yield running
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        watchdog.cancel()


@pytest.fixture
def tight(other, tmp_path) -> Iterator[Running]:
    """Room for one of the two at a time."""
    yield from start(
        "tiny", str(other), "--kv-gb", "0.02", "--memory-gb", "0.1", "--keys", str(tmp_path / "keys"), "--open"
    )


def test_models_are_swapped_within_the_budget_and_reload_from_memory(tight, tripool):
    assert "tiny: ready, default" in tight.banner and "other: unloaded" in tight.banner
    first = tight.say("tiny")["choices"][0]["text"]
    sizes = []
    for name in ("other", "tiny") * 4:
        answer = tight.say(name)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, first)
        models = tight.models()
        assert {one: reported["state"] for one, reported in models.items()} == {
            name: "ready",
            ({"tiny", "other"} - {name}).pop(): "unloaded",
        }
        sizes.append(tight.loaded_bytes())
    assert models["tiny"]["from_model_cache"] and models["tiny"]["bytes"] < 0.1 * 2**30
    assert sizes[-1] < sizes[1] + 20e6, "what was unloaded stays in memory"
    listed = json.loads(tripool("models", "list", "--url", tight.url, "--format", "json").out)
    assert [(one["id"], one["default"]) for one in listed] == [("tiny", True), ("other", False)]
    assert "other is ready" in tripool("models", "load", "other", "--url", tight.url).out
    assert tripool("models", "unload", "other", "--url", tight.url).out == "other is unloaded\n"
    refused = tripool("models", "load", "nothing", "--url", tight.url)
    assert refused.code == 2 and "there is no model 'nothing'" in refused.err


@pytest.mark.prove
def test_two_at_once_answer_as_each_does_alone(other, tmp_path):
    for running in start("tiny", str(other), "--kv-gb", "0.02", "--keys", str(tmp_path / "keys"), "--open"):
        running.http.post("/v1/models/load", json={"model": "other"})
        alone = [running.say(name, max_tokens=40)["choices"][0]["text"] for name in ("tiny", "other")]
        together: dict[str, list[str]] = {"tiny": [], "other": []}

        def ask(name: str, url: str = running.url, texts: dict[str, list[str]] = together) -> None:
            body = {"model": name, "prompt": "Once upon", "max_tokens": 40, "temperature": 0}
            for _ in range(3):
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).json()
                texts[name].append(answer["choices"][0]["text"])

        threads = [threading.Thread(target=ask, args=(name,)) for name in together for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert together == {"tiny": [alone[0]] * 6, "other": [alone[1]] * 6}


@pytest.mark.parametrize("options", [(), ("--split",)], ids=["colocated", "split"])
def test_two_of_one_name_are_refused(tripool, tmp_path, options):
    ran = tripool("serve", "tiny", "tiny", "--port", "0", "--keys", str(tmp_path / "keys"), "--open", *options)
    assert ran.code == 2 and "two models are named 'tiny'" in ran.err


def test_what_cannot_fit_is_said_before_it_is_loaded(tripool, tmp_path):
    ran = tripool("serve", "tiny", "--port", "0", "--memory-gb", "0.01", "--keys", str(tmp_path / "keys"), "--open")
    assert ran.code == 2 and "'tiny' needs" in ran.err


@pytest.mark.prove
def test_kept_models_are_there_at_the_next_start(tmp_path):
    """What is kept lies in the user's own folder of shared memory: here, another."""
    code = (
        "import sys; from pathlib import Path; from tripool.serving import weight_cache; "
        "folder = Path(sys.argv.pop(1)); weight_cache.memory_folder = lambda: folder; "
        "from tripool.cli.main import main; main()"
    )
    kept = []
    for _ in range(2):
        arguments = ["serve", "tiny", "--keep-models", "--port", "0", "--kv-gb", "0.02", "--memory-gb", "1"]
        command = [sys.executable, "-c", code, str(tmp_path), *arguments, "--keys", str(tmp_path / "keys"), "--open"]
        for running in start(command=command):
            kept.append(running.models()["tiny"]["from_model_cache"])
    assert kept == [False, True]
