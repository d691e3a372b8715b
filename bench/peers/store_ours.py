"""Tripool's cache pool behind the store protocol: one member process, blocks by look-up, lease, copy and checksum."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash
from store import Bytes, serve

import tripool
from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.messages import WorkerId

NUM_SLOTS, SLOT_BYTES = 64, 2**20
START_WITHIN_S = 30.0
MEMBER = f"""
import sys
from pathlib import Path
from tripool.cache.member import run_member
from tripool.config import CacheConfig
from tripool.messages import WorkerId
run_member(Path(sys.argv[1]), WorkerId("cache-0", 1), CacheConfig(slot_bytes={SLOT_BYTES}, num_slots={NUM_SLOTS}))
"""


class Pool:
    def host(self) -> tuple[str, str]:
        self._folder = Path(tempfile.mkdtemp(prefix="tripool-bench-", dir="/dev/shm"))
        self._member = subprocess.Popen([sys.executable, "-c", MEMBER, str(self._folder)])
        self._connect("writer")
        return str(self._folder), tripool.__version__

    def join(self, place: str, buffers: Sequence[Bytes]) -> None:
        self._folder = Path(place)
        self._connect("reader")

    def put(self, keys: Sequence[str], blocks: Sequence[Bytes]) -> None:
        # Each block by itself: a chain of one, so that a batch is looked up block by block in one message.
        assert self._client.store([bytes.fromhex(key) for key in keys], blocks, namespace="bench") == len(keys)

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        assert self._client.fetch([bytes.fromhex(key) for key in keys], into, namespace="bench") == len(keys)

    def floor(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        """Nothing but memory: where the blocks are was found before."""
        for key, target in zip(keys, into, strict=True):
            target[:] = self._where[bytes.fromhex(key)]
            xxhash.xxh3_64_intdigest(target)

    def close(self) -> None:
        if hasattr(self, "_member"):
            self._member.terminate()
            self._member.wait(START_WITHIN_S)
            shutil.rmtree(self._folder)

    def _connect(self, worker: str) -> None:
        self._client = PoolClient(LocalHost(self._folder), ["cache-0"], WorkerId(worker, 1))
        missing = self._client.wait(START_WITHIN_S)
        assert not missing, "the member did not start"

    @property
    def _where(self) -> dict[bytes, Bytes]:
        if not hasattr(self, "_found"):
            keys = [number.to_bytes(16, "big") for number in range(NUM_SLOTS)]
            with self._client.find(keys, namespace="bench") as prefix:
                arena = prefix._held[0].found.arena
                found = zip(keys, prefix.blocks, strict=False)
                self._found = {key: arena.view(block.slot, block.num_bytes) for key, block in found}
        return self._found


if __name__ == "__main__":
    serve(Pool())
