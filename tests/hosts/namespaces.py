"""Hosts as network namespaces, joined by a switch, with links that can be cut, slowed, or cut in one direction."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("a", "b", "c", "d")
_SERIALS = itertools.count()
"""A process may have several networks at once."""


class Network:
    """Host "a" is .1 of a network of this process, and so on; the test itself is .254."""

    def __init__(self) -> None:
        serial = next(_SERIALS)
        self._tag = f"tp{os.getpid() % 100_000}n{serial}"
        self._switch = f"{self._tag}s"
        number = os.getpid() + 7919 * serial
        self._net = f"10.{64 + number // 256 % 64}.{number % 256}"

    def make(self) -> None:
        _ip("netns", "add", self._switch)
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("link", "set", "br0", "up")
        for number, name in enumerate(NAMES, 1):
            _ip("netns", "add", self.namespace(name))
            self._plug(name, f"{self._net}.{number}", self.namespace(name))
        self._plug("t", f"{self._net}.254", None)

    def remove(self) -> None:
        for namespace in (*map(self.namespace, NAMES), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}t"], check=False, capture_output=True)

    def namespace(self, name: str) -> str:
        return f"{self._tag}{name}"

    def address(self, name: str) -> str:
        return f"{self._net}.{NAMES.index(name) + 1}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.namespace(name))

    @property
    def in_switch(self) -> tuple[str, ...]:
        """Runs a command at the switch, where all packets pass; host "a" is at its device "pa"."""
        return ("ip", "netns", "exec", self._switch)

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

    def drop(self, name: str, *match: str) -> None:
        """What host `name` gets and the rule matches is dropped, as a firewall drops it: "-s ADDRESS", "-p tcp" ..."""
        subprocess.run([*self.prefix(name), "iptables", "-A", "INPUT", *match, "-j", "DROP"], check=True)

    def drop_nothing(self, name: str) -> None:
        subprocess.run([*self.prefix(name), "iptables", "-F", "INPUT"], check=True)

    @contextmanager
    def listening(self, name: str, port: int) -> Iterator[None]:
        """Another program has that port."""
        program = f"import socket, sys; s = socket.create_server(('', {port})); print(flush=True); sys.stdin.read()"
        command = [*self.prefix(name), sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            yield
            process.stdin.close()

    def add_address(self, name: str, address: str) -> None:
        """Another one, that the other hosts have no route to."""
        _ip("-n", self.namespace(name), "address", "add", f"{address}/32", "dev", "eth0")

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


def possible(*programs: str) -> bool:
    """Whether this process may make namespaces, and has these programs besides."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", *programs))):
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
