"""A block store's half of the benchmark protocol: one JSON object per line, in on stdin, out on stdout.

| asked                                         | answered                                                           |
|-----------------------------------------------|--------------------------------------------------------------------|
| {"do": "host"}                                | {"place", "version"}: the store is up, and can be joined there     |
| {"do": "put", "num_blocks", "block_bytes"}    | {}: blocks 0, 1, ... are there for everybody                       |
| {"do": "join", "place", and the same, "batch"} | {}: a second process is ready to get them                         |
| {"do": "get", "batch", "repeat"}              | {"us"}: median of one get of `batch` blocks into own memory         |
| {"do": "floor", "batch", "repeat"}            | {"us"}: the same bytes copied and hashed, with nothing around it    |

Two processes run each program: the first hosts and puts, and starts the second, which joins and gets. Every block that
was got is compared with what was put, outside the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    def host(self) -> tuple[str, str]: ...

    def join(self, place: str, buffers: Sequence[Bytes]) -> None:
        """`buffers` are where blocks will be wanted: a store may want to know them beforehand."""

    def put(self, keys: Sequence[str], blocks: Sequence[Bytes]) -> None: ...

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        """Leave the blocks in the reader's own memory."""

    def close(self) -> None: ...


def block(number: int, block_bytes: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, block_bytes, np.uint8)


def key(number: int) -> str:
    return f"{number:032x}"


class _Session:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_blocks = self._turn = 0
        self._buffers: list[Bytes] = []
        self._expected: list[Bytes] = []

    def host(self) -> dict[str, Any]:
        place, version = self._store.host()
        return {"place": place, "version": version}

    def join(self, place: str, num_blocks: int, block_bytes: int, batch: int) -> dict[str, Any]:
        self._num_blocks = num_blocks
        self._expected = [block(number, block_bytes) for number in range(num_blocks)]
        # At the beginning of a page, as any cache of keys and values is.
        self._buffers = [np.frombuffer(mmap(-1, block_bytes), np.uint8) for _ in range(batch)]
        for buffer in self._buffers:
            buffer[:] = 1
        self._store.join(place, self._buffers)
        return {}

    def put(self, num_blocks: int, block_bytes: int) -> dict[str, Any]:
        for number in range(num_blocks):
            self._store.put([key(number)], [block(number, block_bytes)])
        return {}

    def get(self, batch: int, repeat: int) -> dict[str, Any]:
        return {"us": self._median_us(self._store.get, batch, repeat)}

    def floor(self, batch: int, repeat: int) -> dict[str, Any]:
        return {"us": self._median_us(self._store.floor, batch, repeat)}  # type: ignore[attr-defined]  # only ours

    def _median_us(self, get: Callable[[Sequence[str], Sequence[Bytes]], None], batch: int, repeat: int) -> float:
        took_us = []
        for _ in range(repeat):
            numbers = [(self._turn + i) % self._num_blocks for i in range(batch)]
            self._turn = (self._turn + batch) % self._num_blocks
            keys, into = [key(number) for number in numbers], self._buffers[:batch]
            began = time.perf_counter()
            get(keys, into)
            took_us.append((time.perf_counter() - began) * 1e6)
            for number, got in zip(numbers, into, strict=True):
                assert np.array_equal(got, self._expected[number]), f"block {number} came out wrong"
        return statistics.median(took_us)


class _Reader:
    """The second process, a child of the first: what a store needs to be joined, it inherits the usual way."""

    def __init__(self) -> None:
        command = [sys.executable, sys.argv[0], "reader"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the reader died"}')
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(store: Store) -> None:
    # Stores print to stdout as they please; the protocol keeps the real one for itself.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    session = _Session(store)
    is_reader, reader = "reader" in sys.argv[1:], None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] in ("host", "put") or is_reader:
                reply = getattr(session, message.pop("do"))(**message)
            else:
                reader = reader or _Reader()
                reply = reader.ask(message)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a store raises becomes a failed row
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
    if reader is not None:
        reader.close()
    store.close()
    # Stores with threads of their own can hang in their destructors; nobody needs those to run.
    os._exit(0)
