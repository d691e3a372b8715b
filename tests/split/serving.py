"""A split server as its user starts it: real processes, real sockets; and what its own status says about it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tripool.config import PoolSize

DEADLINE_S = 120.0
LOOK_S = 0.01

START = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"


class SplitServer:
    def __init__(self, process: subprocess.Popen[str], url: str, headers: dict[str, str]) -> None:
        self.process, self.url, self.banner = process, url, ""
        # An idle connection may be closed by the server just as it is used again.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers, limits=fresh)
        self.log: list[str] = []
        """Of all its processes."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def pools(self) -> dict[str, Any]:
        return self.http.get("/v1/pools").raise_for_status().json()

    def pids(self, role: str) -> list[int]:
        return [worker["pid"] for worker in self.pools()["workers"] if worker["role"] == role]

    def children(self) -> list[int]:
        """Of the supervisor."""
        return list(
            map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text("ascii").split())
        )

    def all(self, word: str) -> list[int]:
        """The children that were started with this word in their commands."""
        found = []
        for pid in self.children():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if word in Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0"):
                    found.append(pid)
        return found

    def find(self, word: str) -> int | None:
        return next(iter(self.all(word)), None)

    def child(self, word: str) -> int:
        pid = self.find(word)
        assert pid is not None, word
        return pid

    def worker_ids(self) -> set[tuple[str, int]]:
        return {(worker["worker"], worker["epoch"]) for worker in self.pools()["workers"]}

    def wait(self, what: Callable[[dict[str, Any]], bool], within_s: float = DEADLINE_S) -> float:
        """Until the pools are so; returns how long that took."""
        began_s = time.monotonic()
        while not what(pools := self.pools()):
            assert time.monotonic() - began_s < within_s, (pools, self.log)
            threading.Event().wait(LOOK_S)
        return time.monotonic() - began_s

    def wait_idle(self, num_workers: int, within_s: float = DEADLINE_S) -> None:
        """Every worker there, and not a block, a lease or a request held anywhere."""

        def idle(pools: dict[str, Any]) -> bool:
            held = [(w["placed"], w["running"], w["blocks_held"], w["waiting_tokens"]) for w in pools["workers"]]
            return pools["requests"] == 0 and held == [(0, 0, 0, 0)] * num_workers

        self.wait(idle, within_s)


@contextmanager
def split_server(
    model: str = "fake",
    *,
    prefill: int | str = 1,
    decode: int | str = 1,
    options: tuple[str, ...] = (),
    headers: dict[str, str] | None = None,
    start: str = START,
    prefix: tuple[str, ...] = (),
    num_workers: int | None = None,
) -> Iterator[SplitServer]:
    """`prefill`, `decode`: as on the command line. `headers`: of every request, such as an admin's key. `start`: the
    program that is the supervisor. `prefix`: a command that runs it elsewhere, such as in a network namespace.
    `num_workers`: those that it starts itself, if not all."""
    if num_workers is None:
        num_workers = sum(PoolSize.parse(str(size)).num_workers for size in (prefill, decode))
    argv = ["serve", model, "--port", "0", "--prefill", str(prefill), "--decode", str(decode), *options]
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", start, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(DEADLINE_S, process.kill)  # so that the read below cannot last for ever
        watchdog.start()
        try:
            assert process.stdout is not None
            banner = ""
            while "Ctrl-C" not in banner:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                banner += line
            watchdog.cancel()
            found = re.search(r"at (\S+)/v1", banner)
            assert found
            server = SplitServer(process, found[1], headers or {})
            server.banner = banner
            try:
                server.wait(lambda pools: len(pools["workers"]) == num_workers)
                yield server
            finally:
                server.http.close()
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(DEADLINE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
