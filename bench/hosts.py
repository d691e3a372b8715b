"""KV and cache blocks between two hosts, beside bare connections that do nothing else; and how soon a worker serves.

    python bench/hosts.py            two processes over loopback, and the start of a worker of the bundled model
    python bench/hosts.py --quick    fewer repetitions

Ours is what serves: KV is asked for, received, copied out and checked block by block; a cached block is looked up at
its member, sent, received into the buffer that is to hold it, and checked. The bare pair sends as many
bytes from as much memory over one connection of the same kind (TLS 1.3 with the same key, or TCP) into as much memory,
and looks at none of them.
Sides take turns.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from harness import Origin, Row, print_table, take_turns, write_json
from tripool.cache import wire
from tripool.cache.host import LocalHost
from tripool.cache.member import Member, MemberServer
from tripool.config import CacheConfig
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
BLOCK_BYTES, NUM_BLOCKS, BLOCK_TOKENS = 2**20, 64, 64
KEY = bytes(range(16))
NAMESPACE = "bench"
START_S = 6.0
START = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
WITHIN_S = 60.0


# ---- the sending side: a process of its own -------------------------------------------------------------------------


def transfer(folder: Path, own: OwnHost, name: str) -> HostTransfer:
    local = SharedMemoryTransfer(
        folder, WorkerId(name, 1), block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, num_slots=NUM_BLOCKS
    )
    return HostTransfer(own, DirectoryFile(folder), local)


def serve_bare(listener: socket.socket, keys: HostKeys) -> None:
    """Sends as many bytes as eight bytes ask for."""
    source = [memoryview(bytearray(os.urandom(BLOCK_BYTES))) for _ in range(NUM_BLOCKS)]
    while True:
        end, _ = listener.accept()
        threading.Thread(target=answer_bare, args=(end, keys, source), daemon=True).start()


def answer_bare(end: socket.socket, keys: HostKeys, source: list[memoryview]) -> None:
    connection = answer(end, keys)
    connection.timeout(None)
    wanted = bytearray(8)
    try:
        while True:
            connection.read_into(memoryview(wanted))
            connection.write(source[: int.from_bytes(wanted, "little") // BLOCK_BYTES])
    except OSError:
        connection.close()


def host_side(folder: Path, trusted: bool) -> None:
    """Until its input ends. Tells where it is in one line."""
    own = OwnHost("sender", TOKEN, trusted, members={"m": ("cache-0",)})
    own.write(folder)
    write_models(folder, ())
    member = Member(LocalHost(folder), WorkerId("cache-0", 1), CacheConfig(slot_bytes=BLOCK_BYTES, num_slots=8))
    wake, _waker = socket.socketpair()
    sockets = MemberServer(wire.address(folder, "cache-0"))
    bare, listener = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    server = HostServer(folder, listener, WorkerId("host-server", 1), own, Leader(folder))
    threads: list[tuple[Callable[..., None], tuple[object, ...]]] = [
        (sockets.serve, (member, wake, lambda: True)),
        (serve_bare, (bare, own.keys)),
        (server.run, (lambda: True,)),
    ]
    for target, arguments in threads:
        threading.Thread(target=target, args=arguments, daemon=True).start()
    sender = transfer(folder, own, "prefill-0").sender()
    lease = sender.lease("r", 1, 0, [None] * NUM_BLOCKS, num_tokens=NUM_BLOCKS * BLOCK_TOKENS, deadline_s=1e18)
    assert lease is not None
    for _ in range(NUM_BLOCKS):
        sender.fill(lease, lambda view: view.__setitem__(slice(None), os.urandom(len(view))))
    told = {
        "host": listener.getsockname()[1],
        "bare": bare.getsockname()[1],
        "descriptor": base64.b64encode(sender.descriptor(lease).payload).decode(),
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    os._exit(0)


# ---- the receiving side ---------------------------------------------------------------------------------------------


class Pair:
    def __init__(self, folder: Path, trusted: bool, told: dict[str, object], stack: ExitStack) -> None:
        address = f"tcp://127.0.0.1:{told['host']}"
        own = OwnHost("receiver", TOKEN, trusted, join=address)
        own.write(folder)
        write_directory(folder, Directory((Host("sender", address, {"m": ("cache-0",)}), own.host)))
        self._receiver = transfer(folder, own, "decode-0").receiver()
        stack.callback(self._receiver.close)
        self._descriptor = KvDescriptor("hosts", base64.b64decode(str(told["descriptor"])))
        self._into = memoryview(bytearray(BLOCK_BYTES))
        self._bare_into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(NUM_BLOCKS)]
        self._bare: Connection = dial(f"tcp://127.0.0.1:{told['bare']}", own.keys)
        self._bare.timeout(WITHIN_S)
        stack.callback(self._bare.close)
        pool = pool_client(folder, (), WorkerId("decode-0", 1), model="m")
        assert pool is not None
        self._pool = pool
        stack.callback(pool.close)
        self._store()

    def _store(self) -> None:
        block, deadline_s = np.frombuffer(os.urandom(BLOCK_BYTES), np.uint8), time.monotonic() + WITHIN_S
        while self._pool.fetch([KEY], [bytearray(BLOCK_BYTES)], namespace=NAMESPACE) != 1:
            assert time.monotonic() < deadline_s
            self._pool.store([KEY], [block], namespace=NAMESPACE)
            time.sleep(0.05)

    def kv_mb_per_s(self, _: int) -> float:
        began_s = time.perf_counter()
        kv = self._receiver.open(self._descriptor, NUM_BLOCKS * BLOCK_TOKENS)
        assert kv is not None
        kv.begin()
        while not kv.arrived:
            time.sleep(0.0005)
        for index in range(NUM_BLOCKS):
            assert kv.read(index, self._into)
        kv.close()
        return NUM_BLOCKS * BLOCK_BYTES / 1e6 / (time.perf_counter() - began_s)

    def bare_mb_per_s(self, _: int) -> float:
        return NUM_BLOCKS * BLOCK_BYTES / 1e6 / self._bare_s(NUM_BLOCKS)

    def _bare_s(self, num_blocks: int) -> float:
        began_s = time.perf_counter()
        self._bare.write([memoryview((num_blocks * BLOCK_BYTES).to_bytes(8, "little"))])
        for buffer in self._bare_into[:num_blocks]:
            self._bare.read_into(buffer)
        return time.perf_counter() - began_s

    def block_us(self, repeat: int) -> float:
        began_s = time.perf_counter()
        for _ in range(repeat):
            assert self._pool.fetch([KEY], [self._into], namespace=NAMESPACE) == 1
        return (time.perf_counter() - began_s) / repeat * 1e6

    def bare_block_us(self, repeat: int) -> float:
        return sum(self._bare_s(1) for _ in range(repeat)) / repeat * 1e6


@contextmanager
def pair(trusted: bool) -> Iterator[Pair]:
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        folders = [base / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        command = [sys.executable, __file__, "--host-side", str(folders[0])] + (["--trusted"] if trusted else [])
        sending = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert sending.stdout is not None and sending.stdin is not None
        stack.callback(sending.stdin.close)
        yield Pair(folders[1], trusted, json.loads(sending.stdout.readline()), stack)


def pair_rows(trusted: bool, repetitions: int, repeat: int) -> list[Row]:
    kind, mode = ("TCP", "trusted") if trusted else ("TLS", "encrypted")
    with pair(trusted) as both:
        for warm_up in (both.kv_mb_per_s, both.bare_mb_per_s):
            warm_up(0)
        kv = take_turns({"ours": both.kv_mb_per_s, "bare": both.bare_mb_per_s}, repetitions)
        block = take_turns(
            {"ours": lambda _: both.block_us(repeat), "bare": lambda _: both.bare_block_us(repeat)}, repetitions
        )
    return [
        Row(
            name=f"64 MB of KV, {mode}", ours=kv.median("ours"), peer=kv.median("bare"),
            unit="MB/s", target=0.7, note=f"peer: a bare {kind} pair",
        ),
        Row(
            name=f"1 MB block of another host, {mode}", ours=block.median("ours"),
            peer=block.median("bare"), unit="µs", target=2.0, lower_is_better=True, note=f"peer: a bare {kind} pair",
        ),
    ]  # fmt: skip


# ---- how soon a worker serves ---------------------------------------------------------------------------------------


def start_row(repetitions: int) -> Row:
    """From the command on another host until its worker has joined: the bundled model, fetched over the network."""
    took_s = []
    command = [sys.executable, "-c", START]
    serve = ["serve", "tiny", "--port", "0", "--listen", "127.0.0.1:0", "--threads", "1"]
    with subprocess.Popen([*command, *serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        banner = ""
        while "Ctrl-C" not in banner:
            line = server.stdout.readline()
            assert line, "the server did not start"
            banner += line
        found = re.search(r"tripool (worker --join \S+ --token \S+)", banner)
        assert found
        for _ in range(repetitions):
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as cache:
                argv = [*command, *found[1].split(), "--role", "decode", "--threads", "1"]
                environment = os.environ | {"XDG_CACHE_HOME": cache}
                joining = subprocess.Popen(
                    argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
                )
                with joining:
                    assert joining.stdout is not None
                    while not (line := joining.stdout.readline()).startswith("ready"):
                        assert line, "the worker did not start"
                    took_s.append(time.monotonic() - began_s)
                    joining.terminate()
        server.terminate()
    took = sorted(took_s)[len(took_s) // 2]
    note = "peer: the bar; from the command to a worker that is ready"
    return Row(
        name="a worker of another host serves", ours=took, peer=START_S, unit="s", target=1.0, lower_is_better=True,
        note=note,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--host-side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--trusted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host_side:
        host_side(options.host_side, options.trusted)
    origin = Origin.now()
    repetitions, repeat = (5, 8) if options.quick else (15, 32)
    made = [row for trusted in (False, True) for row in pair_rows(trusted, repetitions, repeat)]
    made.append(start_row(1 if options.quick else 3))
    print_table(made, origin, "Between hosts")
    if options.json:
        write_json(made, origin, options.json)
    return 0 if all(row.ok is not False for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
