"""The server as a process: a banner when it is ready, answers, and a clean end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

DEADLINE_S = 60.0

# A shell starts background jobs with Ctrl-C ignored, and the test run may be one: undo that, as a terminal would.
FAKE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tripool.cli.main import main
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
main(["serve", "fake", "--port", "0"], lambda model, config: PagedFake(fake_text(), context_tokens=10**9, step_s=0.005))
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FAKE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        watchdog = threading.Timer(DEADLINE_S, running.kill)  # so that no read below can last for ever
        watchdog.start()
        yield running
        watchdog.cancel()
        running.kill()


def read_banner(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    banner = ""
    while "Ctrl-C" not in banner:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        banner += line
    return banner


def read_log_until(process: subprocess.Popen[str], event: str) -> str:
    assert process.stderr is not None
    logged = ""
    while not logged or said(logged)[-1] != event:
        line = process.stderr.readline()
        assert line, logged
        logged += line
    return logged


def said(err: str) -> list[str]:
    """The first word of each line of the log: nothing else is on stderr."""
    return [re.fullmatch(r"\S+Z (?:INFO|WARNING) server\[\d+\] (\w+) .*", line)[1] for line in err.splitlines()]


def test_serves_and_stops(process):
    banner = read_banner(process)
    found = re.search(r"curl (\S+) .*\n\s+-d '(.*)'", banner)
    assert found, banner
    answer = httpx.post(
        found[1], content=found[2], headers={"content-type": "application/json"}, timeout=DEADLINE_S
    ).json()
    assert answer["choices"][0]["message"]["content"]
    logged = read_log_until(process, "request")  # it is written after the answer's last byte: the client may be ahead
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert said(logged + err) == ["start", "ready", "request", "stopping", "stopped"]


def test_stops_within_its_bound_while_an_answer_goes_on(process):
    url = re.search(r"curl (\S+)", read_banner(process))[1]
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        *_, last, empty = lines
    assert (json.loads(last.removeprefix("data: "))["error"]["code"], empty) == ("engine_stopped", "")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert said(err) == ["start", "ready", "stopping", "request", "stopped"]


def test_a_signal_to_end_closes_everything_on_the_way(process):
    """The last usage is written and the last line is logged: the signal alone would end the process before that."""
    read_banner(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "")
    assert said(err) == ["start", "ready", "stopping", "stopped"]


def test_a_taken_port_is_said_before_loading(tripool, models):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = tripool("serve", "fake", "--port", str(port))
    assert ran.code == 2
    assert ran.err.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")
    assert not models.loaded
