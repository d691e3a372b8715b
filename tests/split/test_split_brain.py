"""Leader and standby that lose each other, as real processes: one decides, and no client notices."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import faults
from .serving import DEADLINE_S, SplitServer, split_server
from .streams import Asked, Clients, expected, make_bodies

MODEL = "fake:step_ms=8,step_tokens=256,running=40"


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server(MODEL, prefill=1, decode=2, options=("--gateways", "2")) as running:
        running.wait(lambda pools: pools["standbys"] == 1)
        yield running


@contextmanager
def streams(server: SplitServer, seconds: float) -> Iterator[None]:
    """One after the other of each of 16 clients while the block runs, and for so many seconds: all must be right."""
    until_s, wrong = [float("inf")], list[Any]()

    async def go() -> None:
        await asyncio.gather(*(client(number) for number in range(16)))

    async def client(number: int) -> None:
        turn = 0
        while not turn or time.monotonic() < until_s[0]:
            body = make_bodies(1, prompt_tokens=60, answer_tokens=80, seed=100 * number + turn)[0] | {"seed": number}
            outcomes = await Clients(server.url, [Asked(body)]).run()
            wrong.extend(outcome.error or "wrong" for outcome in outcomes if outcome.tokens != expected(body))
            turn += 1

    runner = threading.Thread(target=lambda: asyncio.run(go()))
    runner.start()
    server.wait(lambda pools: pools["requests"] > 8)
    try:
        yield
    finally:
        until_s[0] = time.monotonic() + seconds
        runner.join(DEADLINE_S)
    assert not runner.is_alive() and not wrong, wrong[:3]


def leaders(server: SplitServer) -> list[str]:
    """Epochs that led, in the order in which they said so."""
    return [found[1] for line in server.log if (found := re.search(r" leading .*epoch=(\d+)", line))]


@pytest.mark.prove
@pytest.mark.parametrize("seconds", [0.3, 10.0])
def test_a_leader_that_was_stopped_wakes_up(server: SplitServer, seconds: float) -> None:
    """For less than its standby waits it goes on; for longer, it is dead before another one leads."""
    before = server.pools()
    with streams(server, 1.0):
        faults.stop(before["coordinator_pid"])
        threading.Event().wait(seconds)
        faults.wake(before["coordinator_pid"])
    after = server.pools()
    same = seconds < 0.6
    assert (after["coordinator_epoch"] == before["coordinator_epoch"]) == same
    assert Path(f"/proc/{before['coordinator_pid']}").exists() == same
    assert leaders(server) == sorted(leaders(server), key=int)
    server.wait(lambda pools: pools["standbys"] == 1)
    server.wait_idle(3)


@pytest.mark.prove
def test_leader_and_standby_that_do_not_hear_each_other(server: SplitServer) -> None:
    """Their connection is cut as often as it is made: the standby ends the leader and leads, and the leader's epoch is
    over. Then the next standby follows."""
    before = server.pools()
    standby = next(pid for pid in server.all("coordinator") if pid != before["coordinator_pid"])
    with streams(server, 1.0):
        deadline_s = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{before['coordinator_pid']}").exists():
            assert time.monotonic() < deadline_s
            faults.cut(standby, lambda peer: peer.endswith("/gateways.sock"))
            threading.Event().wait(0.002)
    after = server.pools()
    assert after["coordinator_pid"] == standby and after["coordinator_epoch"] == before["coordinator_epoch"] + 1
    server.wait(lambda pools: pools["standbys"] == 1)
    server.wait_idle(3)


@pytest.mark.prove
def test_a_leader_that_is_not_the_one_of_the_run_folder_ends(server: SplitServer) -> None:
    """As if another arbiter had decided: it decides nothing more, and the standby leads with a higher epoch."""
    before = server.pools()
    folder = Path(before["join"].removeprefix("ipc://")).parent
    with streams(server, 1.0):
        (folder / "leader").write_text(str(before["coordinator_epoch"] + 5))
        server.wait(lambda pools: pools["coordinator_pid"] != before["coordinator_pid"])
    assert server.pools()["coordinator_epoch"] == before["coordinator_epoch"] + 6
    assert any("another coordinator leads" in line for line in server.log)
    server.wait_idle(3)


@pytest.mark.prove
def test_everything_that_decides_dies_at_once(server: SplitServer) -> None:
    """Leader, standby and both gateways: what has a key is computed again, with the same tokens, as its seed is the
    key's; a client that had a part of it goes on from there."""
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}
    headers = {"Idempotency-Key": "all"}
    whole = server.http.post("/v1/completions", json=body | {"seed": 0}).json()["usage"]
    last, texts = "", list[str]()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, headers=headers,
                      timeout=DEADLINE_S) as response:  # fmt: skip
        lines, data = response.iter_lines(), ""
        for line in lines:
            data = line if line.startswith("data: {") else data
            last = line.removeprefix("id: ") if line.startswith("id: ") else last
            if not line:
                texts.append(data.partition('"text":')[2].partition(',"logprobs"')[0])
            if len(texts) == 20:
                break
        for pid in [*server.all("coordinator"), *server.all("gateway")]:
            faults.kill(pid)
    server.wait(lambda pools: len(pools["gateways"]) == 2 and len(pools["workers"]) == 3)
    again = server.http.post("/v1/completions", json=body | {"stream": True}, headers=headers | {"Last-Event-ID": last})
    assert again.status_code == 200, again.text
    rest = [line for line in again.text.split("\n") if line.startswith("data: {")]
    assert len(texts) + len(rest) >= whole["completion_tokens"] - 5
    fresh = server.http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
    events = [line for line in fresh.text.split("\n") if line.startswith("data: {")]
    assert events[20:] == rest
    assert [event.partition('"text":')[2].partition(',"logprobs"')[0] for event in events[:20]] == texts
