"""The split server over the fake engine: what clients get, where it leaves them, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .serving import DEADLINE_S, SplitServer, split_server
from .streams import Asked, Clients, expected, make_bodies


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server("fake:step_ms=1", prefill=1, decode=2) as running:
        yield running


def test_many_streams_get_what_an_engine_alone_would_say(server: SplitServer) -> None:
    bodies = make_bodies(24, prompt_tokens=200, answer_tokens=40)
    outcomes = asyncio.run(Clients(server.url, [Asked(body) for body in bodies]).run())
    assert [outcome.error for outcome in outcomes] == [None] * len(bodies)
    assert [outcome.tokens for outcome in outcomes] == [expected(body) for body in bodies]
    assert all(set(outcome.finish.values()) == {"length"} for outcome in outcomes)
    server.wait_idle(3)


def test_structures_and_logprobs_cross_the_hand_over(server: SplitServer) -> None:
    body = {
        "prompt": "Say it", "seed": 3, "max_tokens": 200, "logprobs": 2, "n": 3,
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
    }  # fmt: skip
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["text"]).keys() == {"a"}
        assert len(choice["logprobs"]["tokens"]) > 2
    server.wait_idle(3)


def test_the_second_request_with_the_same_beginning_hits(server: SplitServer) -> None:
    body = {"prompt": list(range(4, 204)), "max_tokens": 8, "seed": 1}
    usages = [server.http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 192]


def test_what_cannot_work_is_refused_by_the_worker_with_its_own_words(server: SplitServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": [4] * 5000, "max_tokens": 8})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    server.wait_idle(3)


def test_status_shows_the_pools(server: SplitServer) -> None:
    command = [sys.executable, "-m", "tripool", "status", "--url", server.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    named = [line.split()[0] for line in shown.splitlines() if "-" in line.split()[0]]
    assert named == ["decode-0", "decode-1", "prefill-0", "cache-0", "cache-1"]
    assert "join: ipc://" in shown


def test_a_worker_joins_and_leaves(server: SplitServer) -> None:
    address = server.pools()["join"]
    command = [sys.executable, "-m", "tripool", "worker", "fake", "--role", "decode", "--join", address]
    with subprocess.Popen(command) as joined:
        server.wait(lambda pools: joined.pid in [worker["pid"] for worker in pools["workers"]])
        joined.send_signal(signal.SIGTERM)
        assert joined.wait(DEADLINE_S) == 0
    server.wait(lambda pools: len(pools["workers"]) == 3)


def test_ctrl_c_ends_every_process_and_removes_the_folder() -> None:
    with split_server("fake:step_ms=5") as server:
        folder = Path(server.pools()["join"].removeprefix("ipc://")).parent
        pids = [worker["pid"] for worker in server.pools()["workers"]]
        assert folder.stat().st_mode & 0o777 == 0o700
        with httpx.stream("POST", f"{server.url}/v1/completions", timeout=DEADLINE_S, json={
            "prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "max_tokens": 4000,
        }) as response:  # fmt: skip
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGINT)
            *_, last, _ = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert server.process.wait(DEADLINE_S) == 130
        assert not folder.exists()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
