"""Faults of hosts and links while answers flow: no request hangs, no token is lost, repeated or changed, nothing leaks.

    pytest -m prove -s tests/hosts/test_faults.py        prints the table

The tokens of an answer are those of one process (`expected`). What is left after a row would be leaked: requests,
placements, slots and blocks of workers, leases and reservations of cache members, connections of host servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hosts.fleet import Fleet, fleet
from hosts.namespaces import possible
from split.streams import Asked, Clients, Outcome, expected, make_bodies

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not possible("iptables", "cc"), reason="needs network namespaces, iptables, cc"),
]
NUM_REQUESTS = 24
IDLE_S, CLOSED_S = 30.0, 60.0
CACHE = ("--cache-gb", "0.05")


@dataclass(frozen=True, slots=True)
class Verdict:
    num_requests: int
    hung: int
    failed: int
    lost: int
    repeated: int
    changed: int
    leaked: str
    took_s: float

    @property
    def good(self) -> bool:
        return not (self.hung or self.failed or self.lost or self.repeated or self.changed or self.leaked)


def compare(outcome: Outcome, body: dict[str, Any]) -> str:
    """One word for what is wrong with an answer; none if nothing is."""
    if outcome.error:
        return "hung" if "Timeout" in outcome.error else "failed"
    for choice, want in expected(body).items():
        got = outcome.tokens.get(choice, [])
        if got == want and choice in outcome.finish:
            continue
        return "lost" if got == want[: len(got)] else "repeated" if len(got) > len(want) else "changed"
    return ""


def held(pools: dict[str, Any]) -> list[str]:
    """What nobody should hold when no request is open."""
    found = [f"{pools['requests']} requests"] if pools["requests"] else []
    for worker in pools["workers"]:
        counts = {name: worker[name] for name in ("placed", "running", "blocks_held", "waiting_tokens")}
        found += [f"{count} {name} at {worker['worker']}" for name, count in counts.items() if count]
    for member in pools["cache"]:
        counts = {name: member.get(name, 0) for name in ("leases", "reserved", "away")}
        found += [f"{count} {name} at {member['member']}" for name, count in counts.items() if count]
    return found


def leaked(three: Fleet) -> str:
    """Empty once nothing is held; else what still is after a while."""
    until_s = time.monotonic() + IDLE_S
    while True:
        pools = three.server.pools()
        found = held(pools)
        if len(pools["workers"]) != 3:
            found.append(f"{len(pools['workers'])} workers")
        if not found or time.monotonic() > until_s:
            return ", ".join(found)
        threading.Event().wait(0.05)


def run_row(three: Fleet, fault: Callable[[], object], seed: int, *, resets: bool = False) -> Verdict:
    """Requests flow when the fault begins, and more come until it is over. `resets`: it ends the clients' own
    connections; those ask again, once."""
    bodies: list[dict[str, Any]] = []

    def more() -> Clients:
        made = make_bodies(NUM_REQUESTS, prompt_tokens=600, answer_tokens=400, seed=seed + len(bodies))
        bodies.extend(made)
        return Clients(three.server.url, [Asked(body) for body in made])

    async def run() -> list[Outcome]:
        clients = more()
        running = asyncio.ensure_future(clients.run())
        await clients.flowing.wait()
        faulting = asyncio.ensure_future(asyncio.to_thread(fault))
        outcomes = await running
        while not (faulting.done() or resets):
            outcomes = outcomes + await more().run()
        await faulting
        return outcomes

    began_s = time.monotonic()
    outcomes = asyncio.run(run())
    if resets:
        again = [number for number, outcome in enumerate(outcomes) if outcome.error]
        assert again, "somebody has noticed"
        three.wait(3)
        asked = [Asked(bodies[number]) for number in again]
        for number, outcome in zip(again, asyncio.run(Clients(three.server.url, asked).run()), strict=True):
            outcomes[number] = outcome
    took_s = time.monotonic() - began_s
    wrong = [compare(outcome, body) for outcome, body in zip(outcomes, bodies, strict=True)]
    kinds = [wrong.count(kind) for kind in ("hung", "failed", "lost", "repeated", "changed")]
    for number, kind in enumerate(wrong):
        if kind:
            print(kind, outcomes[number].error, outcomes[number].finish, bodies[number]["n"])
    return Verdict(len(bodies), *kinds, leaked(three), took_s)


class Faults:
    def __init__(self, three: Fleet) -> None:
        self._three, self._net = three, three.net

    def table(self) -> dict[str, Callable[[], None]]:
        return {
            "link of B cut for 0.5 s": lambda: self._cut("b", 0.5),
            "link of B cut for 2 s": lambda: self._cut("b", 2),
            "link of B cut for 10 s": lambda: self._cut("b", 10),
            "link of C, with cache, cut for 2 s": lambda: self._cut("c", 2),
            "nothing from B reaches A, 4 s": lambda: self._one_way("a", "b"),
            "nothing from A reaches B, 4 s": lambda: self._one_way("b", "a"),
            "link of A at 10 Mbit/s, 4 s": self._slow,
            "connections to B half open": self._half_open,
            "host B killed": lambda: self._killed("b"),
            "host C, with cache, killed": lambda: self._killed("c", *CACHE),
            "every process restarted": self._restart_all,
        }

    def _cut(self, name: str, seconds: float) -> None:
        self._net.cut(name)
        time.sleep(seconds)
        self._net.restore(name)

    def _one_way(self, at: str, source: str) -> None:
        self._net.drop(at, "-s", self._net.address(source))
        time.sleep(4)
        self._net.drop_nothing(at)

    def _slow(self) -> None:
        self._net.limit("a", "10mbit", leaving=True)
        time.sleep(4)
        self._net.unlimit("a", leaving=True)

    def _half_open(self) -> None:
        self._net.cut("b")
        self._three.kill("b")  # nobody hears that its connections have ended
        self._net.restore("b")
        self._three.join("b")

    def _killed(self, name: str, *options: str) -> None:
        self._three.kill(name)
        self._three.join(name, *options)

    def _restart_all(self) -> None:
        """One after the other, each back before the next; all but the gateway, whose end its clients see."""
        for kind, pid in self._three.processes().items():
            if not kind.startswith("gateway"):
                before = self._alike(kind)
                os.kill(pid, signal.SIGKILL)
                until_s = time.monotonic() + 60
                while pid in (now := self._alike(kind)) or len(now) < len(before) or self._num_workers() < 3:
                    assert time.monotonic() < until_s, f"{kind} does not come back"
                    time.sleep(0.05)

    def _alike(self, kind: str) -> list[int]:
        """Processes of the same kind at the same host."""
        return [pid for one, pid in self._three.processes().items() if one.split()[::3] == kind.split()[::3]]

    def _num_workers(self) -> int:
        return len(self._three.server.pools()["workers"])

    def gateway(self) -> None:
        os.kill(self._three.server.child("gateway"), signal.SIGKILL)


@pytest.fixture
def clock() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clock"
        path.write_text("+0")
        yield path


def wrong_clock(path: Path) -> tuple[str, ...]:
    """A command whose processes, and theirs, have a wall clock that is off by the seconds in the file."""
    library = path.with_name("clock.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("clock.c"))], check=True)
    return ("env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={path}")


def test_faults_of_hosts_and_links_lose_nothing(clock: Path) -> None:
    with fleet() as three:
        three.join("b")
        three.join("c", *CACHE)
        three.wait(3)
        rows: dict[str, Verdict] = {}

        def row(name: str, fault: Callable[[], object], *, resets: bool = False) -> None:
            rows[name] = run_row(three, fault, 100 * (1 + len(rows)), resets=resets)
            show(name, rows[name])

        row("none", lambda: None)
        num_open = three.num_open()
        faults = Faults(three)
        for name, fault in faults.table().items():
            row(name, fault)
        three.join("d", role="prefill")
        three.wait(4)
        row("host D, with prefill, killed", lambda: three.kill("d"))
        row("gateway killed; its clients ask again", faults.gateway, resets=True)
        three.leave("c")
        three.join("c", *CACHE, prefix=wrong_clock(clock))
        three.wait(3)
        pids = [pid for kind, pid in three.processes().items() if kind.endswith("of c")]
        assert pids and all("clock.so" in Path(f"/proc/{pid}/maps").read_text("ascii") for pid in pids)
        row("clock of C an hour ahead", lambda: clock.write_text("+3600"))
        row("clock of C an hour behind", lambda: clock.write_text("-3600"))
        until_s = time.monotonic() + CLOSED_S
        while (now := three.num_open()) > num_open + 4 and time.monotonic() < until_s:
            time.sleep(0.5)
        print(f"files that host servers have open: {num_open} after the first row, {now} after the last")
        assert now <= num_open + 4, "connections of hosts that are gone are still open"
        assert all(verdict.good for verdict in rows.values()), rows


def show(name: str, verdict: Verdict) -> None:
    counts = [f"{kind} {getattr(verdict, kind)}" for kind in ("hung", "failed", "lost", "repeated", "changed")]
    told = f"{', '.join(counts)}, leaked {verdict.leaked or 0}"
    print(f"{name:38} {verdict.num_requests:4} requests: {told}; {verdict.took_s:.1f} s", flush=True)
