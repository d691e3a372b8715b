"""Ranks of one instance on two or three hosts that share only a network, which is cut and slowed under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hosts.joining import Host, join_line, joined
from hosts.namespaces import Network, network, possible
from hosts.test_experts import OPTIONS, check, kill, offline
from split.serving import DEADLINE_S, SplitServer, split_server
from split.streams import Asked, Clients, Outcome
from split.test_ranks import FORKING
from split.test_tiny import mixed
from tripool import LLM

pytestmark = [pytest.mark.prove, pytest.mark.skipif(not possible("iptables"), reason="needs network namespaces")]
__all__ = ["offline"]


class Spread:
    """An instance on host A and on those that join it."""

    def __init__(self, net: Network, server: SplitServer, stack: ExitStack, num_ranks: int, *options: str) -> None:
        self.net, self.server, self._stack, self._options = net, server, stack, options
        self.num_workers = num_ranks + 1
        self.hosts: dict[str, Host] = {}

    def join(self, name: str = "b") -> None:
        arguments = [*join_line(self.server), "--role", "decode", "--threads", "1", "--kv-gb", "0.1", *self._options]
        self.hosts[name] = self._stack.enter_context(
            joined([*arguments, "--log-level", "info"], prefix=self.net.prefix(name), start=FORKING)
        )

    @property
    def host(self) -> Host:
        return self.hosts["b"]

    def kill(self, name: str) -> None:
        kill(self.hosts.pop(name))

    def all_there(self, pools: dict[str, Any]) -> bool:
        (instance,) = pools["instances"]
        present = all(rank["present"] for rank in instance["ranks"])
        return len(pools["workers"]) == self.num_workers and present

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
        self.server.wait(self.all_there)
        self.server.wait_idle(self.num_workers)
        return outcomes


@contextmanager
def spread(num_ranks: int, names: str, *options: str) -> Iterator[Spread]:
    """As many ranks on A and on each host that joins."""
    here = num_ranks // (1 + len(names))
    with ExitStack() as stack:
        net = stack.enter_context(network())
        address = net.address("a")
        listen = ("--hosts", str(1 + len(names)), "--listen", f"{address}:9100", "--host", address, "--open")
        server = stack.enter_context(
            split_server(
                "tiny", decode=f"1x{num_ranks}", options=(*OPTIONS, *listen, *options), prefix=net.prefix("a"),
                start=FORKING, num_workers=1 + here,
            )
        )  # fmt: skip
        found = Spread(net, server, stack, num_ranks, *options)
        for name in names:
            found.join(name)
        server.wait(found.all_there)
        yield found


@pytest.fixture(scope="module")
def two() -> Iterator[Spread]:
    with spread(4, "b") as found:
        yield found


def test_300_mixed_requests_over_two_hosts(offline: LLM, two: Spread) -> None:
    asked = mixed(300)
    check(offline, asked, two.run(asked))
    steps = {worker["worker"]: worker["steps"] for worker in two.server.pools()["workers"]}
    assert all(steps.values()), steps


def kill_host_server(log: list[str]) -> None:
    started = [
        found for line in log if (found := re.search(r"process started child=host-server child_pid=(\d+)", line))
    ]
    os.kill(int(started[-1][1]), signal.SIGKILL)


def faults(two: Spread) -> dict[str, Callable[[], None]]:
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
        two.kill("b")
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


def test_faults_of_hosts_and_links_change_no_token(offline: LLM, two: Spread) -> None:
    for number, (name, fault) in enumerate(faults(two).items()):
        asked = [body | {"max_tokens": 200} for body in mixed(16, 100 + number)]
        began_s = time.monotonic()
        outcomes = two.run(asked, fault)
        took_s = time.monotonic() - began_s
        check(offline, asked, outcomes)
        print(f"{name}: {len(asked)} of {len(asked)} exact, {took_s:.1f} s until all ranks were back")


@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted"])
def test_ranks_on_three_hosts(offline: LLM, trusted: bool) -> None:
    """A rank each. Then a host dies, and the two that joined lose the way to each other, while answers flow."""
    with spread(3, "bc", *(["--trusted-network"] if trusted else [])) as three:

        def killed() -> None:
            three.kill("c")
            three.join("c")

        def apart() -> None:
            three.net.drop("c", "-s", three.net.address("b"))
            time.sleep(4)
            three.net.drop_nothing("c")

        for number, fault in enumerate((None, killed, apart)):
            asked = [body | {"max_tokens": 100} for body in mixed(40, 200 + number)]
            check(offline, asked, three.run(asked, fault))
            steps = {worker["worker"]: worker["steps"] for worker in three.server.pools()["workers"]}
            assert all(steps.values()) or fault is not None, steps
