"""Mooncake's store behind the store protocol: its own master, one segment with the writer, TCP on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mooncake.store import MooncakeDistributedStore
from store import Bytes, serve

START_WITHIN_S = 30.0
SEGMENT_BYTES = 256 * 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mooncake:
    def host(self) -> tuple[str, str]:
        place, metrics = f"127.0.0.1:{free_port()}", free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        ports = [f"--rpc_port={place.rpartition(':')[2]}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
        self._master = subprocess.Popen([program, *ports], stdout=subprocess.DEVNULL)
        self._wait(place)
        self._open(place, SEGMENT_BYTES)
        return place, version("mooncake-transfer-engine-non-cuda")

    def join(self, place: str, buffers: Sequence[Bytes]) -> None:
        self._open(place, 0)
        for buffer in buffers:
            assert self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    def put(self, keys: Sequence[str], blocks: Sequence[Bytes]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            assert self._store.put(key, block.tobytes()) == 0

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        addresses, sizes = [target.ctypes.data for target in into], [target.nbytes for target in into]
        if len(keys) == 1:
            assert self._store.get_into(keys[0], addresses[0], sizes[0]) == sizes[0]
        else:
            assert self._store.batch_get_into(list(keys), addresses, sizes) == sizes

    def close(self) -> None:
        self._store.close()
        if hasattr(self, "_master"):
            self._master.terminate()
            self._master.wait(START_WITHIN_S)

    def _open(self, place: str, segment_bytes: int) -> None:
        self._store = MooncakeDistributedStore()
        said = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, SEGMENT_BYTES, "tcp", "", place)
        assert said == 0, f"setup said {said}"

    def _wait(self, place: str) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        host, _, port = place.rpartition(":")
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("mooncake_master does not listen")


if __name__ == "__main__":
    serve(Mooncake())
