"""Three hosts that share only a network: A has gateway and prefill, B decode, C decode and a part of the cache."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hosts.joining import Host, join_line, joined
from hosts.namespaces import Network, network
from split.serving import SplitServer, split_server

MODEL = "fake:step_ms=4,blocks=2048"


class Fleet:
    def __init__(self, net: Network, server: SplitServer, stack: ExitStack) -> None:
        self.net, self.server, self._stack = net, server, stack
        self.hosts: dict[str, Host] = {}

    def join(self, name: str, *options: str, prefix: Sequence[str] = (), role: str = "decode") -> None:
        arguments = [*join_line(self.server), "--role", role, *options, "--log-level", "info"]
        command = (*self.net.prefix(name), *prefix)
        self.hosts[name] = self._stack.enter_context(joined(arguments, prefix=command))

    def kill(self, name: str) -> None:
        """All of its processes, at once."""
        host = self.hosts.pop(name)
        for pid in (host.process.pid, *host.children()):
            os.kill(pid, signal.SIGKILL)
        host.process.wait(30)

    def leave(self, name: str) -> None:
        host = self.hosts.pop(name)
        host.process.send_signal(signal.SIGTERM)
        host.process.wait(30)

    def wait(self, num_workers: int) -> None:
        self.server.wait(lambda pools: len(pools["workers"]) == num_workers)

    def processes(self) -> dict[str, int]:
        """Every process that a supervisor has started, on all hosts, by what it was started as."""
        supervisors = {"a": self.server.children(), **{name: host.children() for name, host in self.hosts.items()}}
        found = {}
        for name, pids in supervisors.items():
            for pid in pids:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0")
                    kinds = [word for word in words if word in ("gateway", "worker", "cache-member", "host-server")]
                    if kinds:  # else it has ended, and is not reaped yet
                        found[f"{kinds[0]} {pid} of {name}"] = pid
        return found

    def num_open(self) -> int:
        """Sockets and mapped memory that the hosts' servers have: what is left of a host that is gone would be here."""
        pids = [pid for kind, pid in self.processes().items() if kind.startswith("host-server")]
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


@contextmanager
def fleet(model: str = MODEL, *options: str) -> Iterator[Fleet]:
    """Without B and C, which join later. `options`: of the server."""
    with ExitStack() as stack:
        net = stack.enter_context(network())
        address = net.address("a")
        options = ("--listen", f"{address}:9100", "--host", address, "--open", "--log-level", "info", *options)
        server = stack.enter_context(split_server(model, decode=0, options=options, prefix=net.prefix("a")))
        yield Fleet(net, server, stack)
