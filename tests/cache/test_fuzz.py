"""Whatever a member or a client is sent: nobody falls, the index stays whole, and good messages are answered after."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from fuzz import mutations
from tripool.cache import arena as module
from tripool.cache import wire
from tripool.cache.arena import PAGE
from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.cache.member import _MAX_PEERS, Member
from tripool.cache.records import Block, State, Written, namespace_tag
from tripool.config import CacheConfig
from tripool.messages import SUPERVISOR, Reaped, Suspect, WorkerId

from .conftest import Pool, chain, told

SLOT_BYTES = 64
NUM_SLOTS = 16
CONFIG = CacheConfig(slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
NAMESPACE = namespace_tag("a")
KEYS = tuple(chain(1, 6))
OURS, OTHER = WorkerId("w-0", 1), WorkerId("w-1", 1)


@pytest.fixture
def member(folder: Path) -> Iterator[Member]:
    made = Member(LocalHost(folder), WorkerId("cache-0", 1), CONFIG)
    yield made
    made.close()


def questions(worker_id: WorkerId, ticket: int = 1, lease: int = 1) -> list[bytes]:
    made: list[wire.Request] = [
        wire.Open(1, wire.PROTOCOL, worker_id),
        wire.Lookup(2, worker_id, NAMESPACE, KEYS, (lease,), 5),
        wire.Release(worker_id, (lease,), (0,)),
        wire.Used(worker_id, ((0, ticket), (1, ticket))),
        wire.Reserve(3, worker_id, NAMESPACE, KEYS, (0, 1, 2, 3, 4, 5)),
        wire.Commit(worker_id, ticket, (Written(0, 7, SLOT_BYTES, 1), Written(1, 8, SLOT_BYTES, 1))),
        wire.GetStats(4),
        wire.Purge(5, NAMESPACE),
        wire.Quotas(6, {NAMESPACE: 3}),
        Suspect(OTHER),
        Reaped(OTHER),
    ]
    return [wire.encode(each) for each in made]


def granted(member: Member, worker_id: WorkerId, worker_ids: set[WorkerId]) -> wire.Granted:
    reply = member.answer(wire.encode(wire.Reserve(9, worker_id, NAMESPACE, KEYS)), 0.0, worker_ids)
    assert reply is not None
    answer = wire.decode_reply(reply)
    assert isinstance(answer, wire.Granted)
    return answer


def test_a_member_outlives_every_message(member: Member) -> None:
    rng, now_s = random.Random(17), 0.0
    for turn in range(20):
        worker_ids: set[WorkerId] = set()
        worker_id = WorkerId(rng.choice(("w-0", SUPERVISOR, "p-3")), turn + 1)
        ticket = granted(member, worker_id, worker_ids).ticket
        for data in mutations(questions(worker_id, ticket, lease=ticket + 1), 300, rng):
            now_s += 0.001
            member.answer(data, now_s, worker_ids, lambda answer: None)
            assert len(worker_ids) == 1
        member.expire(now_s)
        member.index.check()
        for each in worker_ids:
            member.lost(each)
    told = wire.decode_reply(member.answer(wire.encode(wire.GetStats(1)), now_s, set()) or b"")
    assert isinstance(told, wire.Stats) and told.strange_messages > 500
    for record in member.index.records:
        if record.writer is not None:
            member.answer(wire.encode(Reaped(record.writer)), now_s, {WorkerId(SUPERVISOR, 1)})
    for question in (wire.Quotas(1, {}), wire.Purge(2, NAMESPACE)):
        member.answer(wire.encode(question), now_s, set())
    member.index.check()
    assert granted(member, WorkerId("new", 1), set()).slots, "and still grants room"


def test_nobody_speaks_for_another(member: Member) -> None:
    """Neither to free what another writes, nor to end its life."""
    theirs, ours = set[WorkerId](), set[WorkerId]()
    ticket = granted(member, OTHER, theirs).ticket
    member.answer(wire.encode(wire.Open(1, wire.PROTOCOL, OURS)), 0.0, ours)
    forged: list[wire.Request] = [
        wire.Open(10, wire.PROTOCOL, OTHER),
        wire.Commit(OTHER, ticket),
        Suspect(OTHER),
        Reaped(OTHER),
        wire.Open(10, wire.PROTOCOL, WorkerId("cache-0", 1)),
        wire.Open(10, wire.PROTOCOL, WorkerId("w-0", 2)),
    ]
    for question in forged:
        assert member.answer(wire.encode(question), 0.0, ours) is None
        assert member.index.num_reserved == len(KEYS) and member.index.num_fenced == 0
    assert ours == {OURS}
    supervisor = {WorkerId(SUPERVISOR, 1)}
    member.answer(wire.encode(Reaped(OTHER)), 0.0, supervisor)
    assert member.index.num_reserved == 0


def test_a_member_starts_over_whatever_is_in_the_arena(folder: Path) -> None:
    """Headers are memory that others could write to as well, with a right checksum if they mean it."""
    rng = random.Random(5)
    member = Member(LocalHost(folder), WorkerId("cache-0", 1), CONFIG)
    worker_ids: set[WorkerId] = set()
    grant = granted(member, OURS, worker_ids)
    written = tuple(Written(slot, SLOT_BYTES, SLOT_BYTES) for slot in grant.slots)
    member.answer(wire.encode(wire.Commit(OURS, grant.ticket, written)), 0.0, worker_ids)
    record = member.index.records[grant.slots[0]]
    for slot, forged in enumerate(
        (
            replace(record, ticket=2**64 - 1),
            replace(record, ticket=2**62),
            replace(record, num_bytes=2**32 - 1),
            replace(record, state=State.RESERVED, writer=WorkerId("w" * 43, 2**63 - 1)),
            replace(record, state=State.RESERVED, writer=WorkerId("cache-0", 1)),
        )
    ):
        member.arena.write_header(8 + slot, forged)
    path = member.arena.path
    saved = path.read_bytes()
    member.close()
    for _ in range(60):
        damaged = bytearray(saved)
        for _ in range(rng.randint(0, 30)):
            damaged[rng.randrange(PAGE, len(damaged))] = rng.randrange(256)
        path.touch(0o600)
        path.write_bytes(damaged)
        again = Member(LocalHost(folder), WorkerId("cache-0", 2), CONFIG)
        again.index.check()
        again.answer(wire.encode(wire.Purge(1, NAMESPACE)), 0.0, set())
        granted(again, WorkerId("new", 1), set())
        again.index.check()
        again.close()


def test_a_name_in_a_header_may_be_no_text(member: Member) -> None:
    granted(member, OURS, set())
    at = PAGE
    body = bytearray(member.arena._map[at : at + module._BODY.size])
    body[-43:-40] = b"\xff\xfe\xfd"
    member.arena._map[at : at + module._BODY.size] = bytes(body)
    digest = xxhash.xxh3_64_intdigest(bytes(body))
    module._TAIL.pack_into(member.arena._map, at + module._BODY.size, digest, State.RESERVED)
    assert member.arena.records()[0].state is State.FREE


def test_a_real_member_outlives_its_peers_noise(pool: Pool) -> None:
    """One process, one socket: strangers of the same user."""
    rng = random.Random(3)
    pool.start()
    client = pool.client("p-0")
    path = str(wire.address(pool.folder, "cache-0"))
    for number in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(60)
            line.connect(path)
            for data in mutations(questions(WorkerId(f"n-{number}", 1)), 200, rng):
                if not data:
                    continue  # which is how a line ends
                line.send(data)
                line.setblocking(False)
                try:
                    while line.recv(2**18):
                        pass
                except BlockingIOError:
                    pass
                line.settimeout(60)
    told = client.stats()["cache-0"]
    assert told is not None and told.strange_messages > 100
    assert pool.processes["cache-0"].poll() is None


def answers(number: int, nonce: int, arena: str) -> list[bytes]:
    held = {NAMESPACE: 3}
    made: list[wire.Reply] = [
        wire.Opened(number, wire.PROTOCOL, WorkerId("cache-0", 1), arena, nonce, 1.0, 0),
        wire.LookupResult(number, nonce, 5, (Block(0, 7, SLOT_BYTES, 0), Block(1, 8, SLOT_BYTES, 0, True))),
        wire.Granted(number, nonce, 6, (0, 1), (2, 3)),
        wire.Stats(number, SLOT_BYTES, NUM_SLOTS, 1, 0, 0, 2, 0, 1, 1, 0, 0, 0, 0, held, wire.Disk("on", 5)),
        wire.Purged(number, 3),
    ]
    return [wire.encode(each) for each in made]


def test_a_client_outlives_every_answer(folder: Path, member: Member) -> None:
    """From a member that says anything: it is a miss, never an error, and headers stay as they are."""
    rng = random.Random(11)
    before = member.arena._map[:]
    with Liar(folder, lambda number: _lie(rng, member, number)):
        client = PoolClient(LocalHost(folder), ["liar"], WorkerId("w-0", 1), wait_s=0.002, retry_s=0.0)
        blocks = [bytearray(SLOT_BYTES) for _ in KEYS]
        for _ in range(400):
            assert 0 <= client.fetch(KEYS, blocks, namespace="a") <= len(KEYS)
            assert 0 <= client.store(KEYS, blocks, namespace="a") <= len(KEYS)
            client.stats()
            client.purge([namespace_tag("a")])
            client.limit({"liar": {NAMESPACE: 2}})
        client.close()
    data = member.arena._data
    assert member.arena._map[:PAGE] == before[:PAGE] and data < len(before), "headers are the member's"


def _lie(rng: random.Random, member: Member, number: int) -> bytes:
    """Often a good Opened, or nothing else would ever be asked."""
    good = answers(number, member.arena.nonce, member.arena.path.name)
    if rng.random() < 0.5:
        return rng.choice(good)
    (data, *_) = list(mutations(good, 1, rng))[-1:]
    return data or b"x"


class Liar:
    """A member's socket in this process that answers every question with whatever it is told to."""

    def __init__(self, folder: Path, answer: Callable[[int], bytes]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(wire.address(folder, "liar")))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                try:
                    while data := line.recv(2**18):
                        question = wire.decode_request(data)
                        number = getattr(question, "number", None)
                        if number is not None:
                            line.send(self._answer(number))
                except OSError:
                    continue


def test_a_member_hears_only_so_many(pool: Pool) -> None:
    """Else it would run out of files, and look for ever at a listener that it cannot accept from."""
    pool.start()
    client = pool.client("p-0")
    path = str(wire.address(pool.folder, "cache-0"))
    with ExitStack() as lines:
        for _ in range(_MAX_PEERS):
            line = lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            line.settimeout(60)
            line.connect(path)
        assert line.recv(1) == b"", "the last one is not heard"
        assert told(client).num_slots == 8, "and who was there before still is"
