"""What a host that joined has behind its cache member's memory: found by the other host, and after a restart."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cache.test_mooncake_store import has_store, mooncake
from hosts.joining import Host, join_line, joined
from split.serving import DEADLINE_S, SplitServer, split_server
from split.streams import Asked, Clients, expected, make_bodies
from tripool.config import EngineConfig
from tripool.serving.disk import fingerprint, lasting_name, mark_of
from tripool.serving.hosts import engine_argv
from tripool.serving.joined_cache import _arithmetic

BODIES = make_bodies(10, prompt_tokens=1200, answer_tokens=8, seed=7)
"""More blocks than the prefill worker holds."""
NUM_BLOCKS = 100


@pytest.fixture
def server() -> Iterator[SplitServer]:
    """Without a decode worker and without a cache."""
    options = ("--listen", "127.0.0.1:0", "--cache-gb", "0", "--log-level", "info")
    with split_server("fake:blocks=64", decode=0, options=options) as running:
        yield running


@contextmanager
def host(server: SplitServer, *options: str) -> Iterator[tuple[Host, str]]:
    """And the name of its member."""
    worker = [*join_line(server), "--role", "decode", "--listen", "127.0.0.2:0", "--cache-gb", "0.0001"]
    with joined([*worker, *options, "--log-level", "info"]) as found:
        server.wait(lambda pools: len(pools["workers"]) == 2 and len(pools["cache"]) == 1)
        server.wait(lambda pools: not any(member["away"] for member in pools["cache"]))
        yield found, server.pools()["cache"][0]["member"]
    server.wait(lambda pools: not pools["cache"])


def ask(server: SplitServer) -> None:
    outcomes = asyncio.run(Clients(server.url, [Asked(body) for body in BODIES]).run())
    assert [(one.error, one.tokens) for one in outcomes] == [(None, expected(body)) for body in BODIES]


def count(server: SplitServer, name: str) -> int:
    """0 from a member that does not answer now."""
    (member,) = server.pools()["cache"]
    return int(member.get(name, 0))


def disk(server: SplitServer) -> dict[str, Any]:
    (member,) = server.pools()["cache"]
    return member.get("disk") or {}


@pytest.mark.prove
def test_a_disk_of_a_host_that_joined(server: SplitServer, tmp_path: Path) -> None:
    """Its blocks are found by the server's prefill worker, also after the host has left and come again."""
    options = ("--disk-gb", "0.1", "--disk-dir", str(tmp_path))
    with host(server, *options) as (_, name):
        server.wait(lambda pools: disk(server).get("state") == "on")
        while not disk(server).get("blocks"):  # what a worker cannot reach yet, it does not store
            ask(server)
        server.wait(lambda pools: disk(server).get("pending") == 0)
        blocks = disk(server)["blocks"]
    with host(server, *options) as (_, again):
        assert again == name, "it is asked for the same blocks"
        server.wait(lambda pools: disk(server).get("state") == "on")
        assert disk(server)["blocks"] >= blocks, "they were kept"
        while not disk(server).get("promoted"):  # a member that is slow to answer is a miss
            ask(server)
        assert disk(server)["bad"] == 0


def test_a_name_is_of_one_host_at_a_time(tmp_path: Path) -> None:
    (one, first), (two, second) = lasting_name(tmp_path), lasting_name(tmp_path)
    assert one != two
    os.close(first)
    assert lasting_name(tmp_path)[0] == one
    os.close(second)


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(precision="float32", mtp=False, exact=True)])
def test_blocks_of_both_kinds_of_member_count_as_equal(config: EngineConfig) -> None:
    """So that a store may be behind members of the server and of hosts that joined."""
    assert fingerprint("fake:blocks=64", config) == mark_of(_arithmetic(engine_argv(config)), ["fake:blocks=64"])


@pytest.mark.prove
@pytest.mark.skipif(not has_store(), reason="needs mooncake-transfer-engine-non-cuda and libibverbs1")
def test_a_mooncake_store_behind_a_host_that_joined(server: SplitServer) -> None:
    """The member of the next host has another name and nothing in memory: it finds what the last one has written."""
    with mooncake() as master:
        with host(server, "--mooncake-store", master) as (first, name):
            on(first)
            while count(server, "committed") < NUM_BLOCKS:
                ask(server)
            one_by_one(server, BODIES)  # the prefill worker has room for the last three of them
        with host(server, "--mooncake-store", master) as (second, other):
            on(second)
            assert other != name and not count(server, "committed")
            others = [body | {"prompt": body["prompt"][::-1]} for body in BODIES]
            while not count(server, "misses"):  # until the prefill worker reaches the member
                one_by_one(server, others[:1])
                others.append(others.pop(0))
            found = one_by_one(server, BODIES)
            assert sum(found) > 0
            print(f"tokens found in the store, by prompt: {found}")


def one_by_one(server: SplitServer, bodies: list[dict[str, Any]]) -> list[int]:
    """How many tokens of each prompt were cached."""
    found = []
    for body in bodies:
        answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return found


def on(host: Host) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not any("the Mooncake Store is on" in line for line in host.log):
        assert time.monotonic() < deadline_s, host.log
        time.sleep(0.05)
