"""Processes of `bench/hosts.py`, one JSON line per JSON line: two hosts, a worker that receives, one that decodes."""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tripool.cache import wire
from tripool.cache.host import LocalHost
from tripool.cache.member import Member, MemberServer
from tripool.config import CacheConfig, EngineConfig
from tripool.core import Request, SamplingParams
from tripool.fabric.kv_transfer import IncomingKv
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.hosts.cache import pool_client
from tripool.hosts.connection import Connection, answer, dial
from tripool.hosts.directory import DirectoryFile, OwnHost, write_directory
from tripool.hosts.keys import HostKeys
from tripool.hosts.kv import HostTransfer
from tripool.hosts.leader import Leader, write_models
from tripool.hosts.server import HostServer
from tripool.hosts.wire import Directory, Host
from tripool.messages import KvDescriptor, WorkerId

TOKEN = "only-for-this-benchmark-here"
MB, BLOCK_TOKENS, KEY, NAMESPACE = 2**20, 64, bytes(range(16)), "bench"
WITHIN_S = 60.0
Reply = dict[str, Any]


def transfer(folder: Path, own: OwnHost, name: str, block_bytes: int, num_blocks: int) -> HostTransfer:
    local = SharedMemoryTransfer(
        folder, WorkerId(name, 1), block_tokens=BLOCK_TOKENS, block_bytes=block_bytes, num_slots=num_blocks
    )
    return HostTransfer(own, DirectoryFile(folder), local)


class Sender:
    """The host that has the KV, a cache member, and a bare server."""

    def __init__(self, folder: Path, trusted: bool, block_bytes: int, num_blocks: int) -> None:
        own = OwnHost("sender", TOKEN, trusted, members={"m": ("cache-0",)})
        own.write(folder)
        write_models(folder, ())
        member = Member(LocalHost(folder), WorkerId("cache-0", 1), CacheConfig(slot_bytes=MB, num_slots=8))
        wake, self._waker = socket.socketpair()
        sockets = MemberServer(wire.address(folder, "cache-0"))
        bare, listener = (socket.create_server(("0.0.0.0", 0)) for _ in range(2))
        server = HostServer(folder, listener, WorkerId("host-server", 1), own, Leader(folder))
        start(sockets.serve, member, wake, lambda: True)
        start(serve_bare, bare, own.keys)
        start(server.run, lambda: True)
        self._sender = transfer(folder, own, "prefill-0", block_bytes, num_blocks).sender()
        lease = self._sender.lease("r", 1, 0, [None] * num_blocks, num_tokens=num_blocks * 64, deadline_s=1e18)
        assert lease is not None
        for _ in range(num_blocks):
            self._sender.fill(lease, lambda view: view.__setitem__(slice(None), os.urandom(len(view))))
        self.told = {
            "port": listener.getsockname()[1],
            "bare": bare.getsockname()[1],
            "descriptor": base64.b64encode(self._sender.descriptor(lease).payload).decode(),
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
        }

    def mooncake(self, address: str) -> Reply:
        """As many bytes, for a bare TransferEngine."""
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        assert self._engine.initialize(address, "P2PHANDSHAKE", "tcp", "") == 0
        size = self.told["num_blocks"] * self.told["block_bytes"]
        self._memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._memory[:] = np.frombuffer(os.urandom(MB) * (size // MB), np.uint8)
        start_address = self._memory.ctypes.data
        assert self._engine.register_memory(start_address, size) == 0
        return {"session": f"{address}:{self._engine.get_rpc_port()}", "address": start_address}


def serve_bare(listener: socket.socket, keys: HostKeys) -> None:
    """Sends as many bytes as eight bytes ask for, and looks at none of them."""
    source = [memoryview(bytearray(os.urandom(MB))) for _ in range(64)]
    while True:
        end, _ = listener.accept()
        start(answer_bare, end, keys, source)


def answer_bare(end: socket.socket, keys: HostKeys, source: list[memoryview]) -> None:
    connection = answer(end, keys)
    connection.timeout(None)
    wanted = bytearray(8)
    try:
        while True:
            connection.read_into(memoryview(wanted))
            connection.write(source[: int.from_bytes(wanted, "little") // MB])
    except OSError:
        connection.close()


def receiving_host(folder: Path, trusted: bool, addresses: list[str]) -> Reply:
    """The receiver's own host server, which knows the sender at these addresses."""
    own = OwnHost("receiver", TOKEN, trusted, join=addresses[0])
    own.write(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HostServer(folder, listener, WorkerId("host-server", 1), own)
    known = Host("sender", addresses[0], {"m": ("cache-0",)}, (), tuple(addresses[1:]))
    write_directory(folder, Directory((known, own.host)))
    server._own = OwnHost("receiver", TOKEN, trusted)  # it follows nobody: its directory is the one above
    start(server.run, lambda: True)
    return {}


class Probe:
    """A worker of the receiving host."""

    def __init__(self, folder: Path, trusted: bool, told: Reply, address: str, name: str) -> None:
        own = OwnHost("receiver", TOKEN, trusted)
        self._num_blocks, self._block_bytes = told["num_blocks"], told["block_bytes"]
        self._receiver = transfer(folder, own, name, self._block_bytes, self._num_blocks).receiver()
        self._descriptor = KvDescriptor("hosts", base64.b64decode(told["descriptor"]))
        self._scratch = memoryview(bytearray(max(MB, self._block_bytes)))
        self._into = np.frombuffer(mmap.mmap(-1, 64 * MB), np.uint8)
        self._bare: Connection = dial(f"tcp://{address}:{told['bare']}", own.keys)
        self._bare.timeout(WITHIN_S)
        OwnHost("receiver", TOKEN, trusted, join="tcp://nobody:1").write(folder)  # the pool client reads it
        self._pool = pool_client(folder, (), WorkerId(name, 1), model="m")
        self._bulk = threading.Event()
        self._num_bytes = 0

    def kv(self) -> Reply:
        began_s = time.perf_counter()
        kv = self._open()
        kv.begin()
        while not kv.arrived:
            time.sleep(0.0002)
        assert all(kv.read(index, self._scratch[: self._block_bytes]) for index in range(self._num_blocks))
        kv.close()
        return {"mb_per_s": self._num_blocks * self._block_bytes / 1e6 / (time.perf_counter() - began_s)}

    def _open(self) -> IncomingKv:
        kv = self._receiver.open(self._descriptor, self._num_blocks * BLOCK_TOKENS)
        assert kv is not None
        return kv

    def bare(self, num_blocks: int = 64, repeat: int = 1) -> Reply:
        took_us = []
        for _ in range(repeat):
            began_s = time.perf_counter()
            self._bare.write([memoryview((num_blocks * MB).to_bytes(8, "little"))])
            for number in range(num_blocks):
                self._bare.read_into(self._into[number * MB : (number + 1) * MB].data)
            took_us.append((time.perf_counter() - began_s) * 1e6)
        return {"mb_per_s": num_blocks * MB / took_us[0], "us": took_us}

    def mooncake(self, session: str, address: int, own: str) -> Reply:
        from mooncake.engine import TransferEngine

        if not hasattr(self, "_engine"):
            self._engine = TransferEngine()
            assert self._engine.initialize(own, "P2PHANDSHAKE", "tcp", "") == 0
            assert self._engine.register_memory(self._into.ctypes.data, self._into.nbytes) == 0
        began_s = time.perf_counter()
        assert self._engine.transfer_sync_read(session, self._into.ctypes.data, address, self._into.nbytes) == 0
        return {"mb_per_s": self._into.nbytes / 1e6 / (time.perf_counter() - began_s)}

    def store(self) -> Reply:
        assert self._pool is not None
        block, deadline_s = np.frombuffer(os.urandom(MB), np.uint8), time.monotonic() + WITHIN_S
        while self._pool.fetch([KEY], [bytearray(MB)], namespace=NAMESPACE) != 1:
            assert time.monotonic() < deadline_s
            self._pool.store([KEY], [block], namespace=NAMESPACE)
            time.sleep(0.05)
        return {}

    def block(self, repeat: int, rest_s: float = 0.0) -> Reply:
        took_us, num_missed = [], 0
        for _ in range(repeat):
            began_s = time.perf_counter()
            num_missed += self._pool.fetch([KEY], [self._scratch[:MB]], namespace=NAMESPACE) != 1  # type: ignore[union-attr]
            took_us.append((time.perf_counter() - began_s) * 1e6)
            time.sleep(rest_s)
        return {"us": took_us, "missed": num_missed}

    def bulk(self, on: bool) -> Reply:
        """Receive all the time, or stop; what was received meanwhile, and the longest time without anything."""
        if on:
            self._num_bytes, self._began_s = 0, time.perf_counter()
            self._last_s, self._longest_s, self._num_failed = self._began_s, 0.0, 0
            self._bulk.set()
            self._thread = start(self._receive)
            return {}
        self._bulk.clear()
        self._thread.join(WITHIN_S)
        took_s = time.perf_counter() - self._began_s
        return {
            "mb_per_s": self._num_bytes / 1e6 / took_s, "longest_s": self._longest_s, "failed": self._num_failed,
        }  # fmt: skip

    def _receive(self) -> None:
        """Two at a time, so that there is always something under way."""
        under_way: list[IncomingKv] = []
        while self._bulk.is_set() or under_way:
            while self._bulk.is_set() and len(under_way) < 2:
                under_way.append(self._open())
                under_way[-1].begin()
            done = [kv for kv in under_way if kv.arrived]
            for kv in done:
                now_s = time.perf_counter()
                self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s
                good = kv.read(0, self._scratch[: self._block_bytes]) is not None
                self._num_failed += not good
                self._num_bytes += self._num_blocks * self._block_bytes * good
                kv.close()
                under_way.remove(kv)
            time.sleep(0.001)


class Decoder:
    """A decode worker's engine: a batch of the bundled model, and between two steps what has arrived is imported."""

    def __init__(self, folder: Path, trusted: bool, told: Reply) -> None:
        from tripool.engine.load import load_engine

        self._engine = engine = load_engine("tiny", EngineConfig(threads=1, kv_gb=0.3))
        self._num_blocks, self._block_bytes = told["num_blocks"], told["block_bytes"]
        assert engine.block_bytes == self._block_bytes
        own = OwnHost("receiver", TOKEN, trusted)
        self._receiver = transfer(folder, own, "decode-0", self._block_bytes, 4 * self._num_blocks).receiver()
        self._descriptor = KvDescriptor("hosts", base64.b64decode(told["descriptor"]))
        self._scratch = memoryview(bytearray(self._block_bytes))
        self._number = 0

    def _fill(self) -> None:
        for number in range(8):
            rng = random.Random(self._number * 8 + number)
            params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
            prompt = tuple(rng.randrange(100, 1000) for _ in range(300))
            self._engine.add(Request(id=f"{self._number}-{number}", prompt_ids=prompt, params=params, seed=number))

    def steps(self, count: int, kv: bool) -> Reply:
        """Milliseconds of each step of a batch of eight, with what is imported before it."""
        engine, took_ms, num_bytes = self._engine, [], 0
        self._fill()
        for _ in range(60):
            engine.step()
        under_way: list[tuple[IncomingKv, int]] = []
        began_s = last_s = time.perf_counter()
        while len(took_ms) < count:
            if kv:
                num_bytes += self._import(under_way)
            engine.step()
            now_s = time.perf_counter()
            took_ms.append((now_s - last_s) * 1e3)
            last_s = now_s
        for each, _ in under_way:
            each.close()
        for number in range(8):
            engine.cancel(f"{self._number}-{number}")
        self._number += 1
        return {"ms": took_ms, "mb_per_s": num_bytes / 1e6 / (last_s - began_s)}

    def _import(self, under_way: list[tuple[IncomingKv, int]]) -> int:
        while len(under_way) < 4:
            kv = self._receiver.open(self._descriptor, self._num_blocks * BLOCK_TOKENS)
            assert kv is not None
            kv.begin()
            under_way.append((kv, 0))
        kv, at = under_way[0]
        if not kv.arrived:
            return 0
        blocks: list[int] = []
        self._engine.keep_more(blocks, min(8, self._num_blocks - at))
        for block in blocks:
            data = kv.read(at, self._scratch)
            assert data is not None
            self._engine.import_block(block, data)
            at += 1
        self._engine.let_go(blocks)
        under_way[0] = kv, at
        if at == self._num_blocks:
            kv.close()
            under_way.pop(0)
        return len(blocks) * self._block_bytes


def start(target: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def main() -> None:
    ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
    out = os.dup(1)
    os.dup2(2, 1)  # libraries that print are not answers
    side: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        folder = Path(asked.pop("folder")) if "folder" in asked else None
        made = {"sender": Sender, "probe": Probe, "decoder": Decoder}
        if what in made:
            side = made[what](folder, **asked)
            reply = getattr(side, "told", {})
        else:
            reply = receiving_host(folder, **asked) if what == "host" and folder else getattr(side, what)(**asked)
        os.write(out, json.dumps(reply).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
