"""Real processes: a pipeline killed with SIGKILL anywhere goes on to the same bytes, and canaries on a running server.

Run by hand with `pytest -m prove tests/batch/test_pipeline_kills.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from batch.pipeline_case import BROKEN_TEMPLATE, QUESTIONS, SENTENCE, small_checkpoint, write_case
from tripool.checkpoints import Registry, open_checkpoint

pytestmark = pytest.mark.prove

WITHIN_S = 1200.0
PLACES = (
    "train: begins", "step 1", "step 3", "held out", "exported", "train: made", "quantize: begins", "quantize: 1 of",
    "quantize: 3 of", "quantize: made", "eval: begins", "eval: window 1", "eval: question 2", "eval: made", "gate",
    "register: begins", "register: made", "publish: begins", "publish: made",
)  # fmt: skip
RANDOM_KILLS = 10


KILLING = """
import os, signal, sys
from tripool.cli.main import main

class Watched:
    '''The process ends itself when it has said the line: whoever reads it would be too late.'''

    def __init__(self, stream, place):
        self._stream, self._place, self._line = stream, place, ""

    def write(self, text):
        written = self._stream.write(text)
        *lines, self._line = (self._line + text).split("\\n")
        if any(line.startswith(self._place) for line in lines):
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)

sys.stderr = Watched(sys.stderr, sys.argv[1])
main(sys.argv[2:])
"""


def command(*words: str, kill_at: str | None = None) -> list[str]:
    return [sys.executable, *(["-m", "tripool"] if kill_at is None else ["-c", KILLING, kill_at]), *words]


def run(file: Path, kill_at: str | None = None, kill_after_s: float | None = None) -> tuple[int, list[str]]:
    """Exit status and lines; killed at the first line that begins so, or after a time."""
    with subprocess.Popen(
        command("pipeline", str(file), kill_at=kill_at), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(WITHIN_S if kill_after_s is None else kill_after_s, process.kill)
        watchdog.start()
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
        status = process.wait()
        watchdog.cancel()
    return status, lines


def artefacts(folder: Path) -> dict[str, str]:
    """Content hashes by stage."""
    notes = [json.loads(path.read_text("utf-8")) for path in (folder / "run").glob("*/artefact.json")]
    assert len({note["stage"] for note in notes}) == len(notes), "one of each"
    return {note["stage"]: note["content"] for note in notes}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = write_case(tmp_path_factory.mktemp("undisturbed"))
    status, lines = run(case)
    assert status == 0, lines[-5:]
    return case.parent


def test_killed_at_every_place_it_goes_on_to_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    case = write_case(tmp_path)
    for place in PLACES:
        status, lines = run(case, kill_at=place)
        assert any(line.startswith(place) for line in lines), (place, lines[-5:])
        assert status == -signal.SIGKILL, place
    status, _ = run(case)
    assert status == 0
    assert artefacts(tmp_path) == artefacts(undisturbed)
    _check_registry(tmp_path, undisturbed)


def test_killed_at_random_times_it_goes_on_to_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    case, rng, kills = write_case(tmp_path), random.Random(11), 0
    while kills < RANDOM_KILLS:
        status, _ = run(case, kill_after_s=rng.uniform(2.0, 12.0))
        if status == 0:  # done: once more from nothing
            for one in (tmp_path / "run").glob("*-*"):
                subprocess.run(["rm", "-rf", str(one)], check=True)
        else:
            kills += 1
    status, lines = run(case)
    assert status == 0, lines[-5:]
    assert artefacts(tmp_path) == artefacts(undisturbed)
    _check_registry(tmp_path, undisturbed)


def _check_registry(folder: Path, undisturbed: Path) -> None:
    ours, theirs = (Registry(one / "registry") for one in (folder, undisturbed))
    assert ours.published("story") == 1
    (version,), (other,) = ours.versions("story"), theirs.versions("story")
    assert version.content == other.content
    assert not list((folder / "registry" / "story").glob(".unfinished-*"))


# ---- canaries ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints and a registry, in which the first version is published."""
    folder = tmp_path_factory.mktemp("released")
    small_checkpoint(folder / "good")
    with open_checkpoint("tiny") as tiny:
        small_checkpoint(folder / "as-good", f"{tiny.text.chat_template}{{# says the same #}}")
    small_checkpoint(folder / "broken", BROKEN_TEMPLATE)
    (folder / "text.txt").write_text(SENTENCE * 12, "utf-8")
    (folder / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), "utf-8")
    status, lines = run(pipeline(folder, "first", "good"))
    assert status == 0, lines[-5:]
    return folder


def pipeline(folder: Path, name: str, model: str, url: str = "", requests: int = 30) -> Path:
    canary = (
        f'[canary]\nurl = "{url}"\nshare = 0.3\nrequests = {requests}\nseconds = 200\nmin_requests = {requests}\n'
        "max_slowdown = 0\n"
    )
    file = folder / f"{name}.toml"
    file.write_text(
        f'name = "story"\nregistry = "registry"\nquantize = false\n[import]\nmodel = "{model}"\n'
        f'[eval]\ntext = "text.txt"\ntasks = "q.jsonl"\ntokens = {128 + len(name)}\nwindow = 64\nanswers = 1\n'
        '[gate]\nmax = {perplexity_change = 0.5}\nmin = {"q.acc" = 0.0}\n' + (canary if url else ""),
        "utf-8",
    )
    return file


@contextmanager
def served(folder: Path) -> Iterator[str]:
    words = ("serve", f"{folder}/registry/story", "--port", "0", "--kv-gb", "0.01", "--model-cache-gb", "0")
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(WITHIN_S, process.kill)
        watchdog.start()
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server did not start"
            found = re.search(r"at (http://\S+?)/v1", line)
        try:
            yield found[1]
        finally:
            watchdog.cancel()
            process.terminate()
            process.wait(30)


class Traffic:
    """Clients that talk, each conversation of two turns, until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url, self._stopping = url, threading.Event()
        self.answers: list[tuple[str, int]] = []
        """The version, and the status."""
        self.changed_sides = 0
        self._threads = [threading.Thread(target=self._talk, args=(number,)) for number in range(3)]

    def _talk(self, client: int) -> None:
        with httpx.Client(base_url=self._url, timeout=WITHIN_S) as http:
            number = 0
            while not self._stopping.is_set():
                number += 1
                messages, sides = [{"role": "user", "content": f"Client {client}, conversation {number}"}], set()
                for _ in range(2):
                    body = {"model": "story", "messages": messages, "max_tokens": 3}
                    answer = http.post("/v1/chat/completions", json=body)
                    version = answer.json().get("model", "")
                    self.answers.append((version, answer.status_code))
                    sides.add(version)
                    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
                self.changed_sides += len(sides) > 1

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WITHIN_S)


def test_a_good_model_is_published_also_if_the_pipeline_is_killed_meanwhile(released: Path) -> None:
    with served(released) as url:
        file = pipeline(released, "second-good", "as-good", url)
        status, lines = run(file, kill_at="canary: running")  # without requests it goes on running
        assert status == -signal.SIGKILL, lines[-5:]
        with Traffic(url) as traffic:
            status, lines = run(file)
        assert status == 0, lines[-5:]
        assert Registry(released / "registry").published("story") == 2
        assert {status for _, status in traffic.answers} == {200}
        assert {version for version, _ in traffic.answers} == {"story@1", "story@2"}
        assert traffic.changed_sides <= 6, "only where the canary began or ended between two turns"
        with Traffic(url) as after:
            while len(after.answers) < 12:
                pass
        assert {version for version, _ in after.answers} == {"story@2"}


def test_a_bad_model_is_rolled_back_and_the_pipeline_says_why(released: Path) -> None:
    registry = Registry(released / "registry")
    before = registry.published("story")
    with served(released) as url:
        file = pipeline(released, "third-which-is-bad", "broken", url)
        with Traffic(url) as traffic:
            status, lines = run(file)
        assert status == 2
        assert "was rolled back" in lines[-1] and "failed" in lines[-1]
        assert registry.published("story") == before
        failed = sum(status != 200 for _, status in traffic.answers)
        assert 0 < failed <= 30, "no more clients than the canary's errors"
        with Traffic(url) as after:
            while len(after.answers) < 12:
                pass
        assert {status for _, status in after.answers} == {200}
    assert os.listdir(released / "registry" / "story").count("story@3") == 1, "registered, for those who look into it"
