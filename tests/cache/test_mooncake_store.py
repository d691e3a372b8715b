"""A shared store behind memory: its policy in any order of events, and a real Mooncake Store with two members."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tripool.cache import wire
from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.cache.member import Member, MemberServer
from tripool.cache.mooncake_store import store_class
from tripool.cache.records import Record, State, namespace_tag
from tripool.cache.store_tier import StoreTier
from tripool.config import CacheConfig, StoreConfig
from tripool.errors import StoreMissing
from tripool.messages import WorkerId

BYTES, SLOTS, DEADLINE_S = 70_000, 20, 60.0
KEYS = [random.Random(n).randbytes(16) for n in range(12)]
BLOCKS = [np.frombuffer(random.Random(1000 + n).randbytes(BYTES), np.uint8) for n in range(12)]


def committed(key: bytes, namespace: bytes = b"n" * 16) -> Record:
    return Record(State.COMMITTED, key, namespace, 1, 0, None, 7, 100, 0)


def test_blocks_are_written_once_unless_they_leave_first() -> None:
    tier = StoreTier(SLOTS)
    tier.see([(0, committed(KEYS[0])), (1, committed(KEYS[1]))])
    tier.see([(1, Record())])
    assert (tier.num_pending, tier.counters.lost) == (1, 1)
    (write,) = tier.next_writes(1.0)
    assert write.slot == 0 and not tier.next_writes(1.0)
    tier.see([(0, committed(KEYS[0]))])
    assert not tier.next_writes(1.0), "it is being written"
    tier.written(KEYS[0], True)
    tier.see([(5, committed(KEYS[0]))])
    assert not tier.next_writes(1.0), "the store has it"


def test_after_a_failure_the_store_is_left_alone_for_a_while() -> None:
    tier = StoreTier(SLOTS)
    assert not tier.next_writes(100.0) and tier.find(KEYS[0], b"") is not None
    tier.failed()
    tier.see([(0, committed(KEYS[0]))])
    assert tier.find(KEYS[0], b"") is None and not tier.next_writes(105.0)
    assert len(tier.next_writes(111.0)) == 1 and tier.find(KEYS[0], b"") is not None


def test_any_order_of_events_keeps_the_invariants() -> None:
    for seed in range(40):
        rng, tier, now_s = random.Random(seed), StoreTier(SLOTS), 0.0
        writing: list[bytes] = []
        for _ in range(300):
            now_s += rng.random()
            match rng.randrange(6):
                case 0 | 1:
                    slot = rng.randrange(SLOTS)
                    tier.see([(slot, committed(rng.choice(KEYS)) if rng.random() < 0.7 else Record())])
                case 2:
                    writing += [write.record.key for write in tier.next_writes(now_s)]
                case 3 if writing:
                    tier.written(writing.pop(rng.randrange(len(writing))), rng.random() < 0.8)
                case 4 if rng.random() < 0.1:
                    tier.failed()
                case 5 if rng.random() < 0.2:
                    tier.purge(b"n" * 16)
                    assert tier.num_pending == len(writing)
            tier.check()


# ---- a real store -------------------------------------------------------------------------------------------------


def has_store() -> bool:
    try:
        store_class()
    except StoreMissing:
        return False
    return True


PROVIDER = """
import sys
from tripool.cache.mooncake_store import store_class
store = store_class()()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(argv: list[str], word: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            if word:
                assert process.stdout is not None and any(word in line for line in process.stdout)
            yield process
        finally:
            process.kill()


@contextmanager
def mooncake() -> Iterator[str]:
    """A master, and a client that gives it memory."""
    import mooncake as package

    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    rpc, metrics = (str(end.getsockname()[1]) for end in free)
    for end in free:
        end.close()
    program = os.path.join(os.path.dirname(str(package.__file__)), "mooncake_master")
    argv = [program, f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    with running(argv, "") as master:
        until(lambda: answers(int(rpc)) or master.poll() is not None)
        with running([sys.executable, "-c", PROVIDER, f"127.0.0.1:{rpc}"], "there"):
            yield f"127.0.0.1:{rpc}"


@contextmanager
def member(folder: Path, master: str, fingerprint: str = "00" * 16) -> Iterator[tuple[Member, PoolClient]]:
    folder.mkdir()
    store = StoreConfig(master=master, fingerprint=fingerprint)
    config = CacheConfig(slot_bytes=BYTES, num_slots=SLOTS, store=store)
    found = Member(LocalHost(folder), WorkerId("cache-0", 1), config)
    sockets = MemberServer(wire.address(folder, "cache-0"))
    wake, waker = socket.socketpair()
    thread = threading.Thread(target=sockets.serve, args=(found, wake, lambda: True), daemon=True)
    thread.start()
    client = PoolClient(LocalHost(folder), ["cache-0"], WorkerId("p-0", 1), wait_s=5.0)
    assert not client.wait(DEADLINE_S)
    assert found.store_io is not None
    io = found.store_io
    until(lambda: io.state != "opening")
    assert io.state == "on", io.state
    yield found, client
    client.close()
    waker.send(b"x")
    thread.join(20)
    sockets.close()
    found.close()
    wake.close()
    waker.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.01)


def answers(port: int) -> bool:
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


def fetch(client: PoolClient, namespace: str = "t") -> list[bytes]:
    into = [np.zeros(BYTES, np.uint8) for _ in KEYS]
    return [bytes(block) for block in into[: client.fetch(KEYS, into, namespace=namespace)]]


@pytest.mark.prove
@pytest.mark.skipif(not has_store(), reason="needs mooncake-transfer-engine-non-cuda and libibverbs1")
def test_what_one_member_stores_another_finds_by_key() -> None:
    with tempfile.TemporaryDirectory(prefix="tpm") as base, mooncake() as master:
        with member(Path(base) / "a", master) as (one, writer):
            assert writer.store(KEYS, BLOCKS, namespace="t") == 12
            assert one.store_io is not None
            counters = one.store_io.tier.counters
            until(lambda: counters.written == 12)
        with member(Path(base) / "b", master) as (two, reader):
            assert fetch(reader) == [bytes(block) for block in BLOCKS]
            assert two.store_io is not None and two.store_io.tier.counters.read == 12
            assert fetch(reader, "other tenant") == []
            with member(Path(base) / "c", master, "11" * 16) as (_, stranger):
                assert fetch(stranger) == [], "blocks of another model"
            assert reader.purge([namespace_tag("t")]) == 12
            with member(Path(base) / "d", master) as (_, late):
                assert fetch(late) == [], "purged in the store, too"


@pytest.mark.prove
@pytest.mark.skipif(not has_store(), reason="needs mooncake-transfer-engine-non-cuda and libibverbs1")
def test_a_store_that_dies_is_a_miss() -> None:
    with tempfile.TemporaryDirectory(prefix="tpm") as base:
        with mooncake() as master:
            stack = member(Path(base) / "a", master)
            one, client = stack.__enter__()
        assert fetch(client) == []
        assert client.store(KEYS, BLOCKS, namespace="t") == 12
        assert fetch(client) == [bytes(block) for block in BLOCKS], "memory goes on"
        assert one.store_io is not None
        failures = one.store_io.tier.counters
        until(lambda: failures.failures > 0)
        stack.__exit__(None, None, None)
