"""Hosts as their users start them: a server that listens for others, and workers that join it by the line it prints."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from split.serving import DEADLINE_S, START, SplitServer


def join_line(server: SplitServer) -> list[str]:
    """The arguments of the line that the server prints."""
    found = re.search(r"tripool (worker --join \S+ --token \S+)", server.banner)
    assert found, server.banner
    return found[1].split()


class Host:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self.log: list[str] = []
        self.ready = threading.Event()
        """Also when it has ended."""
        self.over = threading.Event()
        """All that it has logged is here."""
        for target in (self._read_out, self._read_log):
            threading.Thread(target=target, daemon=True).start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("ready"):
                self.ready.set()
        self.ready.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
        self.over.set()

    def child(self, word: str) -> int:
        """The process that was started with this word in its command."""
        (pid,) = [pid for pid in self.children() if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
        return pid

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return list(map(int, path.read_text("ascii").split()))


@contextmanager
def joined(
    arguments: Sequence[str], *, prefix: Sequence[str] = (), wait: bool = True, start: str = START
) -> Iterator[Host]:
    """`prefix`: a command that runs the rest elsewhere, such as in a network namespace. `start`: the program."""
    argv = [*prefix, sys.executable, "-c", start, *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        host = Host(process)
        try:
            if wait:
                assert host.ready.wait(DEADLINE_S) and process.poll() is None, (host.said, host.log)
            yield host
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
