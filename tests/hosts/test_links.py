"""Two hosts with two links: a server that listens everywhere is reached over both, or over what is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hosts.joining import join_line, joined
from hosts.namespaces import possible
from split.serving import split_server
from split.streams import Asked, Clients, expected, make_bodies
from tripool.hosts.wire import Directory, Host


def test_the_server_is_where_it_was_reached_and_at_its_other_addresses() -> None:
    from tripool.hosts.server import _seen_from_here

    links = tuple(f"tcp://10.0.{n}.1:9100" for n in range(3))
    seen = _seen_from_here(Directory((Host("s", "", links=links), Host("b", "tcp://b:1"))), "tcp://name:9100", links[1])
    assert seen.hosts[0] == Host("s", "tcp://name:9100", links=(links[0], links[2]))
    assert seen.hosts[1] == Host("b", "tcp://b:1")


@contextmanager
def two_links() -> Iterator[tuple[str, str]]:
    """Namespaces; link n is device ln, 10.79.n.1 to 10.79.n.2."""
    names = [f"hosttransfer{os.getpid() % 10_000}{end}" for end in "cd"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for link in range(2):
            ip("-n", names[0], "link", "add", f"l{link}", "type", "veth", "peer", "name", f"l{link}", "netns", names[1])
            for end, name in enumerate(names, 1):
                ip("-n", name, "address", "add", f"10.79.{link}.{end}/24", "dev", f"l{link}")
                ip("-n", name, "link", "set", f"l{link}", "up")
        # The test itself speaks HTTP to the first one.
        ip("link", "add", f"{names[0][-6:]}t", "type", "veth", "peer", "name", "lt", "netns", names[0])
        ip("-n", names[0], "address", "add", "10.79.9.1/24", "dev", "lt")
        ip("-n", names[0], "link", "set", "lt", "up")
        ip("address", "add", "10.79.9.254/24", "dev", f"{names[0][-6:]}t")
        ip("link", "set", f"{names[0][-6:]}t", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def received_bytes(namespace: str, device: str) -> int:
    path = f"/sys/class/net/{device}/statistics/rx_bytes"
    return int(subprocess.run(["ip", "netns", "exec", namespace, "cat", path], check=True, capture_output=True).stdout)


@pytest.mark.prove
@pytest.mark.skipif(not possible(), reason="needs network namespaces")
def test_kv_takes_both_links_and_the_one_that_is_left() -> None:
    with two_links() as (one, two):
        options = ("--listen", "0.0.0.0:9100", "--host", "10.79.9.1", "--open")
        prefixes = [("ip", "netns", "exec", name) for name in (one, two)]
        with split_server("fake:step_ms=4,blocks=2048", decode=0, options=options, prefix=prefixes[0]) as server:
            line = join_line(server)
            line[2] = "tcp://10.79.0.1:9100"
            with joined([*line, "--role", "decode"], prefix=prefixes[1]):
                server.wait(lambda pools: len(pools["workers"]) == 2)
                for seed, cut in ((1, False), (2, True)):
                    bodies = make_bodies(40, prompt_tokens=1500, answer_tokens=40, seed=seed)
                    before = received_bytes(two, "l1")

                    async def run(bodies: list[dict] = bodies, cut: bool = cut) -> list:  # type: ignore[type-arg]
                        clients = Clients(server.url, [Asked(body) for body in bodies], at_once=12)
                        running = asyncio.ensure_future(clients.run())
                        await clients.flowing.wait()
                        if cut:
                            ip("-n", one, "link", "set", "l1", "down")
                        return await running

                    outcomes = asyncio.run(run())
                    wrong = [
                        (number, outcome.error)
                        for number, outcome in enumerate(outcomes)
                        if outcome.error or outcome.tokens != expected(bodies[number])
                    ]
                    assert not wrong, wrong[:5]
                    if not cut:
                        assert received_bytes(two, "l1") - before > 100_000, "the second link was used"
                server.wait_idle(2)
