"""Three hosts that share only a network: A has gateway and prefill, B decode, C decode and a part of the cache."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from hosts.joining import Host, join_line, joined
from hosts.namespaces import Network, network, possible
from split.serving import SplitServer, split_server
from split.streams import Asked, Clients, Outcome, expected, make_bodies
from tripool import LLM, SamplingParams
from tripool.checkpoints.names import BUNDLED

pytestmark = [pytest.mark.prove, pytest.mark.skipif(not possible(), reason="needs network namespaces")]
MODEL = "fake:step_ms=4,blocks=2048"


class Three:
    def __init__(self, net: Network, server: SplitServer, stack: ExitStack) -> None:
        self.net, self.server, self._stack = net, server, stack
        self.hosts: dict[str, Host] = {}

    def join(self, name: str, *options: str) -> None:
        arguments = [*join_line(self.server), "--role", "decode", *options, "--log-level", "info"]
        self.hosts[name] = self._stack.enter_context(joined(arguments, prefix=self.net.prefix(name)))

    def kill(self, name: str) -> None:
        """All of its processes, at once."""
        host = self.hosts.pop(name)
        for pid in (host.process.pid, *host.children()):
            os.kill(pid, signal.SIGKILL)
        host.process.wait(30)

    def wait(self, num_workers: int) -> None:
        self.server.wait(lambda pools: len(pools["workers"]) == num_workers)


@pytest.fixture
def three() -> Iterator[Three]:
    with ExitStack() as stack:
        net = stack.enter_context(network())
        address = net.address("a")
        options = ("--listen", f"{address}:9100", "--host", address, "--open", "--log-level", "info")
        server = stack.enter_context(split_server(MODEL, decode=0, options=options, prefix=net.prefix("a")))
        found = Three(net, server, stack)
        found.join("b")
        found.join("c", "--cache-gb", "0.05")
        found.wait(3)
        yield found


def check(outcomes: list[Outcome], bodies: list[dict]) -> None:  # type: ignore[type-arg]
    wrong = [
        (number, one.error)
        for number, one in enumerate(outcomes)
        if one.error or one.tokens != expected(bodies[number])
    ]
    assert not wrong, wrong[:5]


def test_300_requests_are_answered_as_by_one_process(three: Three) -> None:
    bodies = make_bodies(300, prompt_tokens=900, answer_tokens=40, seed=3)
    outcomes = asyncio.run(Clients(three.server.url, [Asked(body) for body in bodies], at_once=48).run())
    check(outcomes, bodies)
    three.server.wait_idle(3)
    workers = {worker["worker"]: worker["steps"] for worker in three.server.pools()["workers"]}
    assert all(workers.values()), f"every host has worked: {workers}"


def test_the_bundled_model_answers_as_in_one_process() -> None:
    """Its weights, too, have come over the network: the other host's user has no copy."""
    prompts = [f"Once upon a time there were {n} small pools. " * (3 + n) for n in range(12)]
    with LLM("tiny", threads=1, kv_gb=0.05) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        want = [answer.choices[0].text for answer in llm.generate(prompts, params)]
    with network() as net, tempfile.TemporaryDirectory() as kept:
        address = net.address("a")
        checkpoint = Path(kept) / "model"
        shutil.copytree(BUNDLED["tiny"], checkpoint)  # under another name than the bundled one: it must be fetched
        options = ("--listen", f"{address}:9100", "--host", address, "--open", "--threads", "1", "--kv-gb", "0.05")
        with split_server(str(checkpoint), decode=0, options=options, prefix=net.prefix("a")) as server:
            prefix = (*net.prefix("b"), "env", f"XDG_CACHE_HOME={kept}/b")
            arguments = [*join_line(server), "--role", "decode", "--threads", "1", "--kv-gb", "0.05"]
            with joined(arguments, prefix=prefix) as host:
                server.wait(lambda pools: len(pools["workers"]) == 2)
                assert any(line.startswith("fetch:") for line in host.said), host.said
                bodies = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in prompts]
                with ThreadPoolExecutor(6) as pool:
                    answers = list(pool.map(lambda body: server.http.post("/v1/completions", json=body).json(), bodies))
                assert [answer["choices"][0]["text"] for answer in answers] == want


def faults(three: Three) -> dict[str, Callable[[], None]]:
    net = three.net

    def cut(name: str, seconds: float) -> None:
        net.cut(name)
        time.sleep(seconds)
        net.restore(name)

    def one_way(name: str, *, leaving: bool) -> None:
        net.limit(name, "1kbit", leaving=leaving)
        time.sleep(4)
        net.unlimit(name, leaving=leaving)

    def slow() -> None:
        net.limit("a", "10mbit", leaving=True)
        time.sleep(4)
        net.unlimit("a", leaving=True)

    def half_open() -> None:
        net.cut("b")
        three.kill("b")  # nobody hears that its connections have ended
        net.restore("b")
        three.join("b")

    def killed() -> None:
        three.kill("b")
        three.join("b")

    def worker_killed() -> None:
        (pid,) = [w["pid"] for w in three.server.pools()["workers"] if w["worker"] in three.hosts["c"].said[-1]]
        os.kill(pid, signal.SIGKILL)

    def server_killed() -> None:
        os.kill(three.server.child("host-server"), signal.SIGKILL)

    return {
        "cut for 0.5 s": lambda: cut("b", 0.5),
        "cut for 2 s": lambda: cut("b", 2),
        "cut for 10 s": lambda: cut("b", 10),
        "nothing leaves b": lambda: one_way("b", leaving=True),
        "nothing reaches b": lambda: one_way("b", leaving=False),
        "10 Mbit/s": slow,
        "worker killed": worker_killed,
        "host server killed": server_killed,
        "host killed": killed,
        "half open": half_open,
    }


def test_faults_of_hosts_and_links_lose_nothing(three: Three) -> None:
    for number, (name, fault) in enumerate(faults(three).items()):
        bodies = make_bodies(24, prompt_tokens=600, answer_tokens=400, seed=100 + number)

        async def run(bodies: list[dict] = bodies, fault: Callable[[], None] = fault) -> list[Outcome]:  # type: ignore[type-arg]
            clients = Clients(three.server.url, [Asked(body) for body in bodies])
            running = asyncio.ensure_future(clients.run())
            await clients.flowing.wait()
            await asyncio.to_thread(fault)
            return await running

        began_s = time.monotonic()
        outcomes = asyncio.run(run())
        took_s = time.monotonic() - began_s
        check(outcomes, bodies)
        three.wait(3)
        three.server.wait_idle(3)
        print(f"{name}: 24 of 24 exact, {took_s:.1f} s")
