"""One instance whose ranks are on two hosts: the tokens of one process, also when a host or its link dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hosts.joining import Host, join_line, joined
from split.serving import SplitServer, split_server
from split.streams import Asked, Clients, Outcome
from split.test_ranks import FORKING
from split.test_tiny import CONFIG, bodies, params_of
from tripool import LLM
from tripool.config import GatewayConfig, PoolSize
from tripool.engine.load import load_engine
from tripool.errors import InvalidRequest
from tripool.serving import AccessConfig, build_split
from tripool.serving.split import SplitConfig

OPTIONS = ("--precision", "int8", "--threads", "1", "--kv-gb", "0.02", "--cache-gb", "0", "--log-level", "info")
HOSTS = ("--hosts", "2", "--listen", "127.0.0.1:0")
WORKERS = 5


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(load_engine("tiny", CONFIG)) as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server("tiny", decode="1x4", options=(*OPTIONS, *HOSTS), start=FORKING, num_workers=3) as running:
        yield running


def join(server: SplitServer) -> Any:
    worker = [*join_line(server), "--role", "decode", "--listen", "127.0.0.2:0", "--threads", "1", "--kv-gb", "0.02"]
    return joined([*worker, "--log-level", "info"], start=FORKING)


def all_there(pools: dict[str, Any]) -> bool:
    (instance,) = pools["instances"]
    return len(pools["workers"]) == WORKERS and all(rank["present"] for rank in instance["ranks"])


def check(offline: LLM, asked: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
    for body, outcome in zip(asked, outcomes, strict=True):
        (alone,) = offline.generate([body["prompt"]], params_of(body))
        assert outcome.error is None
        assert outcome.tokens == {choice.index: list(choice.token_ids) for choice in alone.choices}


def kill(host: Host) -> None:
    """All of its processes, at once."""
    for pid in (*host.children(), host.process.pid):
        os.kill(pid, signal.SIGKILL)
    host.process.wait(30)


def test_two_hosts_give_the_tokens_of_one_engine_and_so_does_one_that_is_left(
    offline: LLM, server: SplitServer
) -> None:
    asked = [body | {"max_tokens": 48} for body in bodies(8)]
    with join(server) as host:
        assert any(line.startswith("start: worker ranks 2, 3 of decode-0 (host") for line in host.said), host.said
        server.wait(all_there)
        check(offline, asked, asyncio.run(Clients(server.url, [Asked(body) for body in asked]).run()))
        server.wait_idle(WORKERS)
        (instance,) = server.pools()["instances"]
        assert all(rank["experts"] and rank["rows"] for rank in instance["ranks"]), instance
        own, other = server.pools()["hosts"]
        assert own["ranks"] == {"decode-0": [0, 1]} and other["ranks"] == {"decode-0": [2, 3]}

        async def killed() -> list[Outcome]:
            clients = Clients(server.url, [Asked(body | {"max_tokens": 96}) for body in asked])
            running = asyncio.ensure_future(clients.run())
            await clients.flowing.wait()
            await asyncio.to_thread(kill, host)
            return await running

        check(offline, [body | {"max_tokens": 96} for body in asked], asyncio.run(killed()))
    server.wait(
        lambda pools: [rank["present"] for rank in pools["instances"][0]["ranks"]] == [True, True, False, False]
    )


def test_nothing_to_spread(tmp_path: Any) -> None:
    pools, access = SplitConfig(decode=PoolSize(1, 2), hosts=3), AccessConfig(tmp_path / "keys", open=True)
    with pytest.raises(InvalidRequest, match="nothing to spread over 3 hosts") as error:
        build_split(["tiny"], gateway=GatewayConfig(port=0), pools=pools, access=access)
    assert "--hosts 2" in error.value.hint
