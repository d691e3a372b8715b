"""`tripool bench` as a user runs it: a table, files, one red line when something is wrong, and Ctrl-C."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from .test_serve import FAKE, read_banner

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server as a process of its own: the client and server run on different processors, as in production."""
    with subprocess.Popen([sys.executable, "-c", FAKE], stdout=subprocess.PIPE, text=True) as running:
        watchdog = threading.Timer(2 * DEADLINE_S, running.kill)
        watchdog.start()
        yield read_banner(running).split("curl ")[1].split("/v1")[0]
        watchdog.cancel()
        running.kill()


def test_a_closed_loop_and_its_files(tripool, url, tmp_path):
    reported, page = tmp_path / "reported.json", tmp_path / "page.html"
    sizes = ("--requests", "20", "--input-len", "30", "--output-len", "10")
    files = ("--json", str(reported), "--html", str(page))
    ran = tripool("bench", "--url", url, "--concurrency", "4", *sizes, *files, "--goodput", "ttft:60000")
    assert ran.code == 0, ran.err
    assert "20 of 20" in ran.out and "first token" in ran.out and "100.0%" in ran.out
    found = json.loads(reported.read_text())
    assert found["summary"]["completed"] == found["summary"]["good"] == 20
    assert found["summary"]["output_tokens"] == 200
    assert found["asked"]["load"] == "4 at once"
    assert page.read_text().startswith("<!doctype html>")


def test_a_trace_at_its_times(tripool, url, tmp_path):
    trace, reported = tmp_path / "trace.jsonl", tmp_path / "reported.json"
    line = '{{"timestamp": {}, "input_length": 1300, "output_length": 40, "hash_ids": [1, 2, {}]}}\n'
    trace.write_text("".join(line.format(200 * number, 10 + number) for number in range(4)))
    scaled = ("--speed", "2", "--scale-tokens", "0.25", "--max-requests", "3", "--endpoint", "completions")
    ran = tripool("bench", "--url", url, "--trace", str(trace), *scaled, "--json", str(reported))
    assert ran.code == 0, ran.err
    rows = json.loads(reported.read_text())["requests"]
    assert [row["due_s"] for row in rows] == [0.0, 0.1, 0.2]
    assert [row["prompt_tokens"] for row in rows] == [2 * 128 + 69] * 3
    assert [row["completion_tokens"] for row in rows] == [10] * 3
    assert sorted(row["cached_tokens"] for row in rows) == [0, 256, 256], "the first request computes it"


def test_a_trace_of_sessions(tripool, url, tmp_path):
    trace, reported = tmp_path / "trace.json", tmp_path / "reported.json"
    requests = [{"t": 0.2 * n, "type": "n", "in": 640, "out": 8, "hash_ids": list(range(9 + n))} for n in range(2)]
    trace.write_text(json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": requests}))
    scaled = ("--scale-tokens", "0.5", "--endpoint", "completions")
    ran = tripool("bench", "--url", url, "--trace", str(trace), *scaled, "--json", str(reported))
    assert ran.code == 0, ran.err
    rows = json.loads(reported.read_text())["requests"]
    assert [row["prompt_tokens"] for row in rows] == [320, 320] and [row["due_s"] for row in rows] == [0.0, 0.2]
    assert sorted(row["cached_tokens"] for row in rows) == [0, 256], "288 tokens are shared, in blocks of 64"


def test_poisson(tripool, url):
    ran = tripool("bench", "--url", f"{url}/v1", "--rate", "200", "--requests", "15", "--output-len", "3")
    assert ran.code == 0, ran.err
    assert "15 of 15" in ran.out and "Poisson, 200/s" in ran.out and "sent late" in ran.out


def test_no_server(tripool):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ran = tripool("bench", "--url", f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].endswith("refused: nothing listens there (is `tripool serve` running?)")


def test_nothing_served(tripool, url):
    ran = tripool("bench", "--url", url, "--model", "nonsense", "--requests", "3", "--concurrency", "1")
    assert ran.code == 2
    assert "failed, 3 times: http 404 model_not_found" in ran.out
    assert "error: no request was served: http 404 model_not_found" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "--rate and --concurrency exclude each other"),
        (("--goodput", "p99:1"), "goodput 'p99:1' is no limit"),
        (("--max-requests", "5"), "--max-requests, --speed and --scale-tokens need --trace"),
        (("--trace", "nowhere.jsonl"), "cannot read nowhere.jsonl"),
        (("--trace", "t", "--requests", "5"), "--requests is for runs without a trace"),
        (("--json", "no/such/folder.json"), "there is no folder no/such"),
        (("--url", "ftp://x"), "'ftp://x' is no URL of a server"),
    ],
)
def test_wrong_options_are_one_line(tripool, options, said):
    ran = tripool("bench", *options)
    assert (ran.code, ran.out) == (2, "")
    assert f"error: {said}" in ran.err


def test_a_bad_trace_names_file_and_line(tripool, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    assert f"error: {trace}: line 1: input_length is None" in tripool("bench", "--trace", str(trace)).err
