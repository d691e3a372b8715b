"""Redis behind the store protocol: Debian's server on a Unix socket without persistence, redis-py with its C parser."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import redis
from store import Bytes, serve

START_WITHIN_S = 30.0
LEAN = ["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]


class Redis:
    def host(self) -> tuple[str, str]:
        if shutil.which("redis-server") is None:
            raise FileNotFoundError("no redis-server (install Debian's package redis-server)")
        self._folder = Path(tempfile.mkdtemp(prefix="redis-bench-"))
        path = self._folder / "redis.sock"
        self._server = subprocess.Popen(["redis-server", *LEAN, "--unixsocket", path, "--dir", self._folder])
        self._client = redis.Redis(unix_socket_path=str(path))
        deadline = time.monotonic() + START_WITHIN_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return str(path), str(self._client.info("server")["redis_version"])

    def join(self, place: str, buffers: Sequence[Bytes]) -> None:
        self._client = redis.Redis(unix_socket_path=place)

    def put(self, keys: Sequence[str], blocks: Sequence[Bytes]) -> None:
        self._client.mset({key: block.tobytes() for key, block in zip(keys, blocks, strict=True)})

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        found = [self._client.get(keys[0])] if len(keys) == 1 else self._client.mget(keys)
        for value, target in zip(found, into, strict=True):
            memoryview(target)[:] = value

    def close(self) -> None:
        if hasattr(self, "_server"):
            self._server.terminate()
            self._server.wait(START_WITHIN_S)
            shutil.rmtree(self._folder)


if __name__ == "__main__":
    serve(Redis())
