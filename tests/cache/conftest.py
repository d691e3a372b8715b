"""A pool of real member processes in a folder of shared memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.cache.wire import Stats
from tripool.messages import WorkerId

BLOCK_BYTES = 100_000  # not a whole number of pages, nor of the pieces that are copied at once
WITHIN_S = 60.0

MEMBER = """
import json, sys
from pathlib import Path
from typing import Any
from tripool.cache.member import run_member
from tripool.config import CacheConfig, DiskConfig
from tripool.messages import WorkerId

config = json.loads(sys.argv[4])
disk = DiskConfig(**config.pop("disk")) if "disk" in config else None
run_member(Path(sys.argv[1]), WorkerId(sys.argv[2], int(sys.argv[3])), CacheConfig(**config, disk=disk))
"""


def content(key: bytes) -> npt.NDArray[np.uint8]:
    """What the block of this key must hold: no two keys agree anywhere near everywhere."""
    return np.random.default_rng(int.from_bytes(key, "big")).integers(0, 256, BLOCK_BYTES, np.uint8)


def chain(seed: int, length: int) -> list[bytes]:
    return [bytes(np.random.default_rng([seed, position]).integers(0, 256, 16, np.uint8)) for position in range(length)]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)  # between looks at another process, which has no event to offer


class Pool:
    def __init__(self, folder: Path, members: Sequence[str]) -> None:
        self.folder, self.members = folder, list(members)
        self.config: dict[str, Any] = {"slot_bytes": BLOCK_BYTES, "num_slots": 8}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[PoolClient] = []
        self._epoch = 0

    def start(self, member: str = "cache-0") -> None:
        self._epoch += 1
        arguments = [str(self.folder), member, str(self._epoch), json.dumps(self.config)]
        self.processes[member] = subprocess.Popen([sys.executable, "-W", "error", "-c", MEMBER, *arguments])

    def kill(self, member: str = "cache-0") -> None:
        self.processes[member].kill()
        self.processes[member].wait(WITHIN_S)

    def signal(self, number: signal.Signals, member: str = "cache-0") -> None:
        os.kill(self.processes[member].pid, number)

    def client(self, worker: str = "p-0", *, epoch: int = 1, wait_s: float = WITHIN_S) -> PoolClient:
        client = PoolClient(LocalHost(self.folder), self.members, WorkerId(worker, epoch), wait_s=wait_s, retry_s=0.01)
        self._clients.append(client)
        assert client.wait(WITHIN_S) == []
        return client

    def run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Another process that imports what tests import; it ends with the pool."""
        command = [sys.executable, "-W", "error", "-c", program, str(self.folder), *arguments]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment)
        self.processes[f"process {process.pid}"] = process  # type: ignore[assignment]  # only ended, never read
        return process

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in self.processes.values():
            process.kill()
            process.wait(WITHIN_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def told(client: PoolClient, member: str = "cache-0") -> Stats:
    said = client.stats()[member]
    assert said is not None
    return said


def buffers(count: int) -> list[npt.NDArray[np.uint8]]:
    return [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(count)]


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="tripool-test-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    pool = Pool(folder, ["cache-0"])
    yield pool
    pool.close()
