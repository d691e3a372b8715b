"""Ranks of one instance on two hosts that share only a network, which is cut, slowed and restored under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hosts.joining import Host, join_line, joined
from hosts.namespaces import Network, network, possible
from hosts.test_experts import OPTIONS, all_there, check, kill, offline
from split.serving import DEADLINE_S, SplitServer, split_server
from split.streams import Asked, Clients, Outcome
from split.test_ranks import FORKING
from split.test_tiny import mixed
from tripool import LLM

pytestmark = [pytest.mark.prove, pytest.mark.skipif(not possible(), reason="needs network namespaces")]
__all__ = ["offline"]
WORKERS = 5


class Two:
    def __init__(self, net: Network, server: SplitServer, stack: ExitStack) -> None:
        self.net, self.server, self._stack = net, server, stack
        self.join()

    def join(self) -> None:
        arguments = [*join_line(self.server), "--role", "decode", "--threads", "1", "--kv-gb", "0.1", "--log-level"]
        self.host: Host = self._stack.enter_context(
            joined([*arguments, "info"], prefix=self.net.prefix("b"), start=FORKING)
        )

    def remote_pid(self) -> int:
        """Of a rank of the other host."""
        names = {worker["worker"]: worker["pid"] for worker in self.server.pools()["workers"]}
        return next(
            pid for name, pid in names.items() if name.startswith("decode-") and not name.startswith("decode-0")
        )

    def run(self, asked: list[dict[str, Any]], fault: Callable[[], None] | None = None) -> list[Outcome]:
        async def ask() -> list[Outcome]:
            clients = Clients(self.server.url, [Asked(body) for body in asked], at_once=48)
            running = asyncio.ensure_future(clients.run())
            if fault is not None:
                await asyncio.wait_for(clients.flowing.wait(), DEADLINE_S)
                await asyncio.to_thread(fault)
            return await running

        outcomes = asyncio.run(ask())
        self.server.wait(all_there)
        self.server.wait_idle(WORKERS)
        return outcomes


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with ExitStack() as stack:
        net = stack.enter_context(network())
        address = net.address("a")
        options = (*OPTIONS, "--hosts", "2", "--listen", f"{address}:9100", "--host", address, "--open")
        server = stack.enter_context(
            split_server(
                "tiny", decode="1x4", options=options, prefix=net.prefix("a"), start=FORKING, num_workers=3
            )
        )  # fmt: skip
        found = Two(net, server, stack)
        server.wait(all_there)
        yield found


def test_300_mixed_requests_over_two_hosts(offline: LLM, two: Two) -> None:
    asked = mixed(300)
    check(offline, asked, two.run(asked))
    steps = {worker["worker"]: worker["steps"] for worker in two.server.pools()["workers"]}
    assert all(steps.values()), steps


def kill_host_server(log: list[str]) -> None:
    started = [
        found for line in log if (found := re.search(r"process started child=host-server child_pid=(\d+)", line))
    ]
    os.kill(int(started[-1][1]), signal.SIGKILL)


def faults(two: Two) -> dict[str, Callable[[], None]]:
    net = two.net

    def cut(seconds: float) -> None:
        net.cut("b")
        time.sleep(seconds)
        net.restore("b")

    def one_way(rate: str, *, leaving: bool) -> None:
        net.limit("b", rate, leaving=leaving)
        time.sleep(4)
        net.unlimit("b", leaving=leaving)

    def killed() -> None:
        kill(two.host)
        two.join()

    def half_open() -> None:
        net.cut("b")
        kill(two.host)  # nobody hears that its connections have ended
        net.restore("b")
        two.join()

    return {
        "cut for 0.5 s": lambda: cut(0.5),
        "cut for 2 s": lambda: cut(2),
        "cut for 10 s": lambda: cut(10),
        "nothing leaves b": lambda: one_way("1kbit", leaving=True),
        "nothing reaches b": lambda: one_way("1kbit", leaving=False),
        "10 Mbit/s": lambda: one_way("10mbit", leaving=True),
        "rank killed": lambda: os.kill(two.remote_pid(), signal.SIGKILL),
        "rank stopped": lambda: os.kill(two.remote_pid(), signal.SIGSTOP),
        "host server killed": lambda: kill_host_server(two.server.log),
        "the other host server killed": lambda: kill_host_server(two.host.log),
        "host killed": killed,
        "half open": half_open,
    }


def test_faults_of_hosts_and_links_change_no_token(offline: LLM, two: Two) -> None:
    for number, (name, fault) in enumerate(faults(two).items()):
        asked = [body | {"max_tokens": 200} for body in mixed(16, 100 + number)]
        began_s = time.monotonic()
        outcomes = two.run(asked, fault)
        took_s = time.monotonic() - began_s
        check(offline, asked, outcomes)
        print(f"{name}: {len(asked)} of {len(asked)} exact, {took_s:.1f} s until all ranks were back")
