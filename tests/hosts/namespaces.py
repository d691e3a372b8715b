"""Hosts as network namespaces, joined by a switch, with links that can be cut, slowed, or cut in one direction."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("a", "b", "c")
_NET = "10.77.0"


class Network:
    """Host "a" is 10.77.0.1, and so on; the test itself is 10.77.0.254."""

    def __init__(self) -> None:
        self._tag = f"tp{os.getpid() % 100_000}"
        self._switch = f"{self._tag}s"

    def make(self) -> None:
        _ip("netns", "add", self._switch)
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        for number, name in enumerate(NAMES, 1):
            _ip("netns", "add", self.namespace(name))
            self._plug(name, f"{_NET}.{number}", self.namespace(name))
        self._plug("t", f"{_NET}.254", None)

    def remove(self) -> None:
        for namespace in (*map(self.namespace, NAMES), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}t"], check=False, capture_output=True)

    def namespace(self, name: str) -> str:
        return f"{self._tag}{name}"

    def address(self, name: str) -> str:
        return f"{_NET}.{NAMES.index(name) + 1}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.namespace(name))

    def cut(self, name: str) -> None:
        self._in_switch("link", "set", f"p{name}", "down")

    def restore(self, name: str) -> None:
        self._in_switch("link", "set", f"p{name}", "up")

    def limit(self, name: str, rate: str, *, leaving: bool) -> None:
        """What a host sends (`leaving`), or what it gets; `rate` as for tc. A kilobit is next to nothing."""
        where = [*self.prefix(name), "tc"] if leaving else ["ip", "netns", "exec", self._switch, "tc"]
        device = "eth0" if leaving else f"p{name}"
        latency = "1ms" if rate == "1kbit" else "50ms"
        burst = "1600" if rate == "1kbit" else "32k"
        tbf = ["root", "tbf", "rate", rate, "burst", burst, "latency", latency]
        subprocess.run([*where, "qdisc", "replace", "dev", device, *tbf], check=True, capture_output=True)

    def unlimit(self, name: str, *, leaving: bool) -> None:
        where = [*self.prefix(name), "tc"] if leaving else ["ip", "netns", "exec", self._switch, "tc"]
        device = "eth0" if leaving else f"p{name}"
        subprocess.run([*where, "qdisc", "del", "dev", device, "root"], check=True, capture_output=True)

    def _plug(self, name: str, address: str, namespace: str | None) -> None:
        inner = f"{self._tag}{name}"
        _ip("link", "add", inner, "type", "veth", "peer", "name", f"p{name}", "netns", self._switch)
        self._in_switch("link", "set", f"p{name}", "master", "br0", "up")
        run = _ip
        if namespace is not None:
            _ip("link", "set", inner, "netns", namespace, "name", "eth0")
            inner = "eth0"

            def run(*arguments: str) -> None:
                _ip("-n", namespace, *arguments)

            run("link", "set", "lo", "up")
        run("address", "add", f"{address}/24", "dev", inner)
        run("link", "set", inner, "up")

    def _in_switch(self, *arguments: str) -> None:
        _ip("-n", self._switch, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def possible() -> bool:
    """Whether this process may make namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    trial = f"tptry{os.getpid() % 100_000}"
    made = subprocess.run(["ip", "netns", "add", trial], check=False, capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", trial], check=False, capture_output=True)
    return made


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.make()
        yield made
    finally:
        made.remove()
