"""The gateway dies, the coordinator, or the supervisor: what the others do about it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import httpx
import pytest

from . import faults
from .serving import DEADLINE_S, split_server

LONG = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "max_tokens": 3000, "seed": 1}
PROMISED_S = 5.0
"""After which a new gateway serves and nothing is held; the suite itself, on whatever machine, waits longer."""

bounded = pytest.mark.parametrize("bound_s", [DEADLINE_S, pytest.param(PROMISED_S, marks=pytest.mark.prove)])


def wait_gone(pids: list[int], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, alive
        threading.Event().wait(0.02)


@bounded
def test_a_killed_gateway_is_replaced_and_workers_hold_nothing(bound_s: float) -> None:
    with split_server("fake:step_ms=5", prefill=1, decode=1) as server:
        gateways = server.pools()["gateways"]
        worker_ids = server.worker_ids()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            killed_s = time.monotonic()
            faults.kill(server.child("gateway"))
            broken = False
            try:
                for _ in lines:
                    pass
            except httpx.HTTPError:
                broken = True
            assert broken, "a stream that was cut off must not look complete"
        # The listening socket is the supervisor's: connections wait for the new gateway instead of being refused.
        # A new connection: one that a client kept open to the dead gateway is reset, as it should be.
        body = {"prompt": [5], "max_tokens": 4, "seed": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - killed_s < bound_s
        server.http.close()
        server.http = httpx.Client(base_url=server.url, timeout=DEADLINE_S)
        server.wait_idle(2, bound_s - (time.monotonic() - killed_s))
        assert server.pools()["gateways"] != gateways
        assert server.worker_ids() == worker_ids, "workers outlive their gateway"


def test_a_killed_coordinator_is_replaced_and_no_stream_is_cut_off() -> None:
    """The gateway keeps its clients, and the next coordinator takes their answers up where they are."""
    body = {**LONG, "max_tokens": 400, "n": 2}
    with split_server("fake:step_ms=5", prefill=1, decode=1) as server:
        whole = server.http.post("/v1/completions", json=body | {"stream": False}).json()["choices"]
        worker_ids, pools = server.worker_ids(), server.pools()
        leader, epoch = pools["coordinator_pid"], pools["coordinator_epoch"]
        texts: dict[int, str] = {}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
            lines = filter(None, response.iter_lines())
            for number, line in enumerate(lines):
                if line == "data: [DONE]":
                    break
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if number == 20:
                    faults.kill(leader)
        assert texts == {choice["index"]: choice["text"] for choice in whole}
        server.wait_idle(2)
        assert server.pools()["coordinator_epoch"] > epoch
        assert server.worker_ids() == worker_ids, "workers outlive their coordinator"


@pytest.mark.prove
@bounded
def test_without_a_supervisor_streams_end_and_then_everybody_leaves(bound_s: float) -> None:
    with split_server("fake:step_ms=5", prefill=1, decode=1) as server:
        folder = Path(server.pools()["join"].removeprefix("ipc://")).parent
        pids = [server.child("gateway"), *(worker["pid"] for worker in server.pools()["workers"])]
        body = LONG | {"max_tokens": 300}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(server.process.pid, 9)
            server.process.wait(DEADLINE_S)
            status = 200
            deadline_s = time.monotonic() + bound_s
            while status == 200 and time.monotonic() < deadline_s:
                try:
                    status = server.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code
                except httpx.TransportError:  # we were slow: the stream has ended by now, and with it the gateway
                    status = 503
            assert status == 503
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert len(events) >= 300
        wait_gone(pids, 2 * bound_s)
        assert not folder.exists()
