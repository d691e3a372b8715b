"""Two hosts on one machine, by two loopback addresses: real processes, that share no run folder."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.joining import Host, join_line, joined
from split.serving import DEADLINE_S, SplitServer, split_server
from split.streams import Asked, Clients, Outcome, expected, make_bodies
from tripool.config import GatewayConfig, PoolSize
from tripool.errors import InvalidRequest
from tripool.serving import AccessConfig, build_split
from tripool.serving.split import SplitConfig


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[SplitServer, Host]]:
    """A server without a decode worker and without a cache, and a host that has both."""
    options = ("--listen", "127.0.0.1:0", "--cache-gb", "0", "--log-level", "info")
    with split_server("fake:blocks=64", decode=0, options=options) as server:
        worker = [*join_line(server), "--role", "decode", "--listen", "127.0.0.2:0", "--cache-gb", "0.01"]
        with joined([*worker, "--log-level", "info"]) as host:
            server.wait(lambda pools: len(pools["workers"]) == 2 and len(pools["cache"]) == 1)
            server.wait(lambda pools: not any(member["away"] for member in pools["cache"]))
            yield server, host


def ask_all(server: SplitServer, bodies: list[dict[str, Any]]) -> list[Outcome]:
    return asyncio.run(Clients(server.url, [Asked(body) for body in bodies]).run())


def test_every_step_of_the_start_is_told(hosts: tuple[SplitServer, Host]) -> None:
    _, host = hosts
    steps = [line.partition(":")[0] for line in host.said]
    assert steps == ["connect", "model", "reach", "start", "ready"], host.said


def test_answers_are_those_of_one_process(hosts: tuple[SplitServer, Host]) -> None:
    server, _ = hosts
    bodies = make_bodies(12, prompt_tokens=400, answer_tokens=24)
    outcomes = ask_all(server, bodies)
    for body, outcome in zip(bodies, outcomes, strict=True):
        assert (outcome.error, outcome.tokens) == (None, expected(body))
    server.wait_idle(2)
    own, other = server.pools()["hosts"]
    assert other["address"].startswith("tcp://127.0.0.2:") and other["roles"] == ["decode"]
    assert (len(own["cache"]), len(other["cache"])) == (0, 1)


def test_blocks_of_the_other_host_are_found(hosts: tuple[SplitServer, Host]) -> None:
    """The prefill worker has room for one prompt only: what it finds again, it finds at the other host."""
    server, _ = hosts
    bodies = make_bodies(10, prompt_tokens=1200, answer_tokens=8, seed=7)
    remote: dict[str, Any] = {"hits": 0}
    deadline_s = time.monotonic() + DEADLINE_S
    while not remote["hits"] and time.monotonic() < deadline_s:  # a member that is slow to answer is a miss
        outcomes = ask_all(server, bodies)
        assert [(one.error, one.tokens) for one in outcomes] == [(None, expected(body)) for body in bodies]
        (remote,) = server.pools()["cache"]
    assert remote["committed"] > 0 and remote["hits"] > 0 and remote["bad"] == 0, remote
    server.wait_idle(2)


def test_answers_go_on_when_processes_of_the_other_host_are_killed(hosts: tuple[SplitServer, Host]) -> None:
    """Its only decode worker, and the process that relays its messages: tokens are those of one process."""
    server, host = hosts
    bodies = make_bodies(6, prompt_tokens=200, answer_tokens=300, seed=11)
    before = server.worker_ids()

    async def run() -> list[Outcome]:
        clients = Clients(server.url, [Asked(body) for body in bodies])
        running = asyncio.ensure_future(clients.run())
        await clients.flowing.wait()
        for word in ("host-server", "worker"):
            os.kill(host.child(word), signal.SIGKILL)
        return await running

    outcomes = asyncio.run(run())
    assert [(one.error, one.tokens) for one in outcomes] == [(None, expected(body)) for body in bodies]
    server.wait_idle(2)
    assert len(server.worker_ids() - before) == 1, "the decode worker is another process"
    server.wait(lambda pools: [(one.get("leases"), one.get("reserved")) for one in pools["cache"]] == [(0, 0)])


def test_a_wrong_start_is_named_by_the_command(hosts: tuple[SplitServer, Host]) -> None:
    server, _ = hosts
    worker, _, address, *token = join_line(server)
    wrong = {
        "copy the token": [worker, "--join", address, "--token", "another-token-of-some-length"],
        "not that of the HTTP server": [worker, "--join", server.url.replace("http", "tcp"), *token],
        "leave out --trusted-network": [worker, "--join", address, *token, "--trusted-network"],
    }
    for remedy, arguments in wrong.items():
        with joined(arguments, wait=False) as host:
            assert host.process.wait(DEADLINE_S) == 2
            host.over.wait(DEADLINE_S)
            assert remedy in host.log[-1], host.log


def test_a_pool_of_none_needs_other_hosts(tmp_path: Path) -> None:
    pools, access = SplitConfig(decode=PoolSize(0)), AccessConfig(tmp_path / "keys", open=True)
    with pytest.raises(InvalidRequest, match="needs a prefill and a decode worker") as error:
        build_split(["fake"], gateway=GatewayConfig(port=0), pools=pools, access=access)
    assert "--listen" in error.value.hint
