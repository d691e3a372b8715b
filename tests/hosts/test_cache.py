"""The cache pool across hosts: blocks of another host's member, found, stored and lost."""

from __future__ import annotations

import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hosts.in_process import Running, host_server
from tripool.cache import wire
from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.cache.member import Member, MemberServer
from tripool.cache.ring import Ring
from tripool.config import CacheConfig
from tripool.hosts.cache import pool_client
from tripool.hosts.connection import dial
from tripool.hosts.directory import OwnHost, write_directory
from tripool.hosts.keys import HostKeys
from tripool.hosts.wire import ANSWERS, AskMember, Data, Directory, Host, Reply, StoreBlocks, Taken
from tripool.messages import Reaped, WorkerId

BYTES, SLOTS = 70_000, 40
DEADLINE_S = 30.0
KEYS = [random.Random(n).randbytes(16) for n in range(40)]
BLOCKS = [np.frombuffer(random.Random(1000 + n).randbytes(BYTES), np.uint8) for n in range(40)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tph") as found:  # short: a socket's path has at most 107 bytes
        yield Path(found)


@contextmanager
def host_with_member(folder: Path, name: str, member: str, trusted: bool) -> Iterator[Running]:
    """A host with one member, which runs in a thread."""
    with host_server(folder, trusted=trusted, members={"m": (member,)}, name=name) as running:
        found = Member(LocalHost(folder), WorkerId(member, 1), CacheConfig(slot_bytes=BYTES, num_slots=SLOTS))
        sockets = MemberServer(wire.address(folder, member))
        wake, waker = socket.socketpair()
        thread = threading.Thread(target=sockets.serve, args=(found, wake, lambda: True), daemon=True)
        thread.start()
        yield running
        waker.send(b"x")
        thread.join(10)
        sockets.close()
        found.close()
        wake.close()
        waker.close()


@pytest.fixture(params=[False, True], ids=["encrypted", "trusted"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    with host_with_member(folder / "a", "server", "cache-0", request.param) as running:
        yield running


@pytest.fixture
def client(server: Running, folder: Path) -> Iterator[PoolClient]:
    """On another host, which has no member."""
    server.known_to(folder / "b")
    found = pool_client(folder / "b", (), WorkerId("decode-b", 1), model="m")
    assert found is not None
    until(lambda: found.stats().get("cache-0") is not None)
    yield found
    found.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def stats(client: PoolClient) -> wire.Stats:
    heard: list[wire.Stats | None] = []
    until(lambda: bool(heard.append(client.stats()["cache-0"]) or heard[-1]))  # a busy machine may be late
    assert heard[-1] is not None
    return heard[-1]


def fetch(client: PoolClient, count: int, first: int = 0, namespace: str = "t") -> list[bytes]:
    into = [np.zeros(BYTES, np.uint8) for _ in range(count - first)]
    num_read = client.fetch(KEYS[:count], into, namespace=namespace, first=first)
    return [bytes(block) for block in into[:num_read]]


def store(client: PoolClient, count: int, first: int = 0) -> None:
    before = stats(client).committed
    assert client.store(KEYS[:count], BLOCKS[first:count], namespace="t", first=first) == count - first
    until(lambda: stats(client).committed == before + count - first)


def test_what_is_stored_at_another_host_is_found_there(client: PoolClient) -> None:
    assert fetch(client, 5) == []
    store(client, 12)
    assert fetch(client, 12) == [bytes(block) for block in BLOCKS[:12]]
    assert fetch(client, 20, first=3) == [bytes(block) for block in BLOCKS[3:12]], "as far as it is there"
    assert fetch(client, 12, namespace="other tenant") == []
    assert (stats(client).leases, stats(client).reserved, stats(client).bad) == (0, 0, 0)


def test_blocks_that_nobody_reads_do_not_disturb_the_next_answer(client: PoolClient) -> None:
    store(client, 30)
    for unread in (1, 5, 30):  # little is read for nothing, much ends the connection
        with client.find(KEYS[:unread], namespace="t") as prefix:
            assert prefix.num_blocks in (0, unread)
        until(lambda: client.stats()["cache-0"] is not None)
        assert fetch(client, 4) == [bytes(block) for block in BLOCKS[:4]]
    with client.find(KEYS[:6], namespace="t") as prefix:
        into = [np.zeros(BYTES, np.uint8) for _ in range(2)]
        assert prefix.read(into) == 2 and bytes(into[1]) == bytes(BLOCKS[1])
    assert fetch(client, 6) == [bytes(block) for block in BLOCKS[:6]]


def test_a_block_that_is_damaged_there_is_not_taken(client: PoolClient, server: Running) -> None:
    store(client, 3)
    local = PoolClient(LocalHost(server.folder), ["cache-0"], WorkerId("p-0", 1), wait_s=DEADLINE_S)
    with local.find(KEYS[:3], namespace="t") as prefix:
        slot = prefix.blocks[1].slot
    arena = local._links["cache-0"].arena
    assert arena is not None
    arena.view(slot, 1)[0] ^= 1
    assert fetch(client, 3) == [bytes(BLOCKS[0])]
    local.close()


def test_tenants_are_purged_on_every_host(client: PoolClient) -> None:
    from tripool.cache.records import namespace_tag

    store(client, 4)
    assert client.purge([namespace_tag("t")]) == 4
    assert fetch(client, 4) == []


def test_a_host_that_is_gone_is_a_miss_at_once(client: PoolClient, server: Running, folder: Path) -> None:
    store(client, 4)
    write_directory(folder / "b", Directory(()))
    until(lambda: client.stats() == {})
    assert fetch(client, 4) == []
    server.known_to(folder / "b")
    until(lambda: client.stats().get("cache-0") is not None)
    assert fetch(client, 4) == [bytes(block) for block in BLOCKS[:4]], "back, with its blocks"


def test_a_writer_that_vanishes_keeps_no_slot(client: PoolClient, server: Running) -> None:
    """Its host's server was the writer: once the connection has ended there, nothing more can arrive."""
    from tripool.cache.copying import checksum
    from tripool.cache.records import namespace_tag

    connection = dial(server.address, HostKeys(server.own.token, server.own.trusted))
    sums = tuple(checksum(block.data) for block in BLOCKS[:3])
    request = StoreBlocks("cache-0", namespace_tag("t"), tuple(KEYS[:3]), (0, 1, 2), 0, (BYTES,) * 3, sums)
    connection.send(request)
    assert connection.receive(ANSWERS) == Taken((0, 1, 2))
    assert stats(client).reserved == 3
    connection.write([BLOCKS[0].data, BLOCKS[1].data[:100]])
    connection.close()
    until(lambda: (stats(client).reserved, stats(client).fenced, stats(client).committed) == (0, 0, 1))
    assert fetch(client, 3) == [bytes(BLOCKS[0])]


def test_a_slow_writer_does_not_hold_up_others(client: PoolClient, server: Running) -> None:
    from tripool.cache.copying import checksum
    from tripool.cache.records import namespace_tag

    slow = dial(server.address, HostKeys(server.own.token, server.own.trusted))
    sums = tuple(checksum(block.data) for block in BLOCKS[20:22])
    slow.send(StoreBlocks("cache-0", namespace_tag("t"), tuple(KEYS[20:22]), (20, 21), 0, (BYTES,) * 2, sums))
    assert slow.receive(ANSWERS) == Taken((0, 1))
    store(client, 4)
    assert fetch(client, 4) == [bytes(block) for block in BLOCKS[:4]]
    slow.write([block.data for block in BLOCKS[20:22]])
    assert slow.receive(ANSWERS) == Data(2)
    slow.close()
    assert (stats(client).committed, stats(client).reserved) == (6, 0)


@pytest.mark.parametrize("second_copy", [False, True])
def test_what_is_read_often_outlives_its_host(folder: Path, second_copy: bool) -> None:
    """Two hosts with a member each; the one that a chain is on is lost after the chain was read three times."""
    with (
        host_with_member(folder / "a", "one", "cache-0", True) as one,
        host_with_member(folder / "b", "two", "cache-1", True) as two,
    ):
        there = {
            member: Host(host.own.name, host.address, host.own.members)
            for member, host in (("cache-0", one), ("cache-1", two))
        }
        own = OwnHost("reader", one.own.token, True, join=one.address, second_copy=second_copy)
        (folder / "c").mkdir()
        own.write(folder / "c")
        write_directory(folder / "c", Directory((*there.values(), own.host)))
        client = pool_client(folder / "c", (), WorkerId("decode-c", 1), model="m")
        assert client is not None
        until(lambda: None not in client.stats().values() and len(client.stats()) == 2)

        def committed() -> int:
            return sum(found.committed for found in client.stats().values() if found is not None)

        assert client.store(KEYS[:12], BLOCKS[:12], namespace="t") == 12
        until(lambda: committed() == 12)
        for _ in range(3):
            assert len(fetch(client, 12)) == 12
        if second_copy:
            until(lambda: committed() == 24)
        left = {member: host for member, host in there.items() if member != Ring(there).owner(KEYS[0])}
        write_directory(folder / "c", Directory((*left.values(), own.host)))
        until(lambda: client.stats().keys() == left.keys())
        assert fetch(client, 12) == ([bytes(block) for block in BLOCKS[:12]] if second_copy else [])
        client.close()


def test_bytes_that_are_not_what_was_announced_are_not_stored(client: PoolClient, server: Running) -> None:
    from tripool.cache.records import namespace_tag

    connection = dial(server.address, HostKeys(server.own.token, server.own.trusted))
    connection.send(StoreBlocks("cache-0", namespace_tag("t"), (KEYS[0],), (0,), 0, (BYTES,), (1,)))
    assert connection.receive(ANSWERS) == Taken((0,))
    connection.write([BLOCKS[0].data])
    connection.receive(ANSWERS)
    connection.close()
    assert (stats(client).committed, fetch(client, 1)) == (0, [])


def test_only_the_supervisor_of_a_host_says_who_has_ended(client: PoolClient, server: Running) -> None:
    connection = dial(server.address, HostKeys(server.own.token, server.own.trusted))
    for question in (wire.Open(1, wire.PROTOCOL, WorkerId("supervisor", 1)), Reaped(WorkerId("p-0", 1))):
        connection.send(AskMember("cache-0", wire.encode(question)))
        assert connection.receive(ANSWERS) == Reply(b"")
    connection.close()


def test_whoever_knows_the_token_and_talks_nonsense_ends_only_its_own_connection(
    client: PoolClient, server: Running
) -> None:
    rng, keys = random.Random(11), HostKeys(server.own.token, server.own.trusted)
    good = [
        StoreBlocks("cache-0", bytes(16), (KEYS[0],), (0,), 0, (BYTES,), (1,)),
        AskMember("cache-0", wire.encode(wire.GetStats(1))),
        AskMember("../x", b""),
    ]
    import msgspec

    for message in good:
        for _ in range(12):
            data = bytearray(msgspec.msgpack.encode(message))
            for _ in range(rng.randint(0, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            connection = dial(server.address, keys)
            connection.send_bytes(bytes(data))
            connection.shut()
            connection.close()
    store(client, 2)
    assert fetch(client, 2) == [bytes(block) for block in BLOCKS[:2]]
