"""Whatever arrives between gateway, workers and supervisor: nobody falls, and what is counted stays right."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fuzz import mutations
from split.in_process import Fleet
from tripool.cache.arena import Arena
from tripool.cache.copying import checksum
from tripool.core import Request, SamplingParams, Slo, Stages, TokenEvent, TokenLogprobs
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.fabric.channel import Line, Switchboard, read_from_worker
from tripool.fabric.shared_memory import BlockTable, MappedArenas, MappedReceiver
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import (
    PROTOCOL,
    Answered,
    AnyMessage,
    Cancel,
    Drain,
    Heartbeat,
    Hello,
    KvDescriptor,
    Left,
    Ready,
    Reaped,
    Refused,
    Release,
    Stamped,
    StartDecode,
    StartPrefill,
    Suspect,
    Tokens,
    TransferDone,
    TransferReady,
    Welcome,
    WorkerId,
    decode,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from tripool.router import Output, Send

PREFILL, DECODE = WorkerId("prefill-0", 1), WorkerId("decode-0", 1)


def request(name: str, tokens: int = 70, n: int = 2) -> Request:
    params = SamplingParams(max_tokens=6, n=n, ignore_eos=True)
    slo = Slo(tpot_ms=50.0, tenant="alice")
    return Request(id=name, prompt_ids=tuple(range(5, 5 + tokens)), params=params, seed=3, slo=slo)


def descriptor() -> KvDescriptor:
    return BlockTable("prefill-0.1.kv", 512, (0, 1), (7, 8)).descriptor()


def from_workers(name: str, attempt: int) -> list[bytes]:
    event = TokenEvent(name, 0, 0, 9, None, TokenLogprobs(-1.0, ((3, -2.0),)), 64, 2, 1, Stages(0.1, 0.1, 0.1))
    made: list[AnyMessage] = []
    for role, worker_id in (("prefill", PREFILL), ("decode", DECODE)):
        made += [
            Hello(PROTOCOL, role, worker_id, 1, "fake", 4096, 16, 4096, 256),  # type: ignore[arg-type]
            Heartbeat(worker_id, 3, 10, 1, 2, 4),
            Tokens(worker_id, (Stamped(attempt, event),)),
            TransferReady(worker_id, name, attempt, 0, 1, 70, descriptor()),
            TransferDone(worker_id, name, attempt, 0),
            Refused(worker_id, name, attempt, "overloaded", "no room", "", False),
            Left(worker_id),
        ]
    return [encode(message) for message in made]


def to_workers(name: str, attempt: int) -> list[bytes]:
    made: list[AnyMessage] = [
        Welcome(1, 0.5),
        StartPrefill(request(name), attempt, (Answered(0, ()), Answered(1, (7, 8))), 5.0),
        StartDecode(request(name), attempt, Answered(0, (7,)), descriptor(), 64, 5.0),
        Release(1),
        Cancel(name, attempt),
        Drain(),
    ]
    return [encode(message) for message in made]


class QueuedFleet(Fleet):
    """Workers hear between two steps, as real ones do, also what answers their own noise."""

    def __init__(self, folder: Path) -> None:
        self._queue: list[Send] = []
        super().__init__(folder, [engine()], [engine()])

    def turn(self) -> None:
        queue, self._queue = self._queue, []
        super()._carry_out([*queue])
        super().turn()

    def _carry_out(self, outputs: list[Output]) -> None:
        self._queue += [output for output in outputs if isinstance(output, Send)]
        super()._carry_out([output for output in outputs if not isinstance(output, Send)])


def engine() -> PagedFake:
    return PagedFake(fake_text(), num_blocks=64, max_running=16, step_tokens=512)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = QueuedFleet(tmp_path)
    yield made
    made.close()


def readable(kind: str, data: bytes) -> AnyMessage | None:
    try:
        return decode_to_worker(data) if kind == "worker" else decode_from_worker(data)
    except msgspec.DecodeError:
        return None


def test_workers_outlive_every_message(fleet: Fleet) -> None:
    rng = random.Random(7)
    read = 0
    for number in range(25):
        fleet.submit(request(f"good-{number}", n=1))
        for data in mutations(to_workers(f"bad-{number}", 1), 60, rng):
            message = readable("worker", data)
            read += message is not None
            for worker in fleet.workers.values():
                if message is not None and not isinstance(message, Welcome | Drain):
                    worker.receive(message, fleet.now_s)
            fleet.turn()
    for worker in fleet.workers.values():
        worker.drop()
    fleet.run_out()
    assert read > 300
    fleet.run([request("after")])
    assert len(fleet.events["after", 0]) == len(fleet.events["after", 1]) == 6, "and serves as before"


def test_a_gateway_outlives_every_message(fleet: Fleet) -> None:
    rng = random.Random(8)
    read = 0
    for number in range(25):
        fleet.submit(request(f"r-{number}"))
        for data in mutations(from_workers(f"r-{number}", 1 + number % 2), 60, rng):
            message = readable("gateway", data)
            read += message is not None
            if message is not None:
                fleet._carry_out(fleet.coordinator.receive(message, fleet.now_s))
            if rng.random() < 0.3:
                fleet.turn()
            fleet.coordinator.check()
    assert read > 300
    for events in fleet.events.values():
        assert all(0 <= event.token_id < 256 and 0 <= event.num_cached_tokens <= 70 for event in events)


def test_a_descriptor_reaches_nothing_outside_its_memory(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a", 64, 4, lazy=True)
    assert arena.back(3)
    receiver, into = MappedReceiver(MappedArenas(tmp_path), 16, 64), memoryview(bytearray(64))
    good = BlockTable("a", 64, (1,), (checksum(memoryview(bytes(64))),))

    def reads(descriptor: KvDescriptor, num_tokens: int = 10) -> bool:
        kv = receiver.open(descriptor, num_tokens)
        return kv is not None and kv.read(0, into)

    assert reads(good.descriptor())
    for slot in (-64, -1, 4, 256, 2**40, 2**62, -(2**63)):
        assert not reads(msgspec.structs.replace(good, slots=(slot,)).descriptor()), slot
    assert not reads(good.descriptor(), 17) and not reads(good.descriptor(), 0)
    assert not reads(msgspec.structs.replace(good, checksums=()).descriptor())
    assert not reads(KvDescriptor("another", good.descriptor().payload))
    for payload in mutations([good.descriptor().payload], 500, random.Random(6)):
        reads(KvDescriptor("shared_memory", payload))
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("empty", "folder", "..", ".", "/etc/passwd", "a\0b", "none", ""):
        assert not reads(msgspec.structs.replace(good, arena=name).descriptor()), name
    receiver.close()
    arena.remove()


def test_only_what_is_a_message_is_read() -> None:
    """And nothing but DecodeError is raised for anything else."""
    rng, every = random.Random(9), [*from_workers("r", 1), *to_workers("r", 1)]
    every += [encode(message) for message in (Suspect(PREFILL), Reaped(PREFILL), Ready(PREFILL, 512))]
    read = named = 0
    for data in [*mutations(every, 5000, rng), b"\x91" * 100_000, b"\x93\xa4Left\xa2\xff\xfe\x01"]:
        for decoder in (decode, decode_from_worker, decode_to_worker):
            try:
                message = decoder(data)
            except msgspec.DecodeError:
                continue
            read += 1
            for worker_id in (getattr(message, field) for field in message.__struct_fields__):
                if isinstance(worker_id, WorkerId):
                    assert worker_id.epoch >= 0 and 0 < len(worker_id.name) <= 64
                    named += 1
            assert not isinstance(message, TransferReady) or min(message.lease, message.num_tokens) >= 0
    assert read > 1000 and named > 100


def test_lines_drop_and_count_what_they_cannot_read() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address, rng = "inproc://gateway", random.Random(4)
    switchboard = Switchboard(context, read_from_worker, address)
    line = Line(context, address, "prefill-0.1.1", decode_to_worker)
    noise = [data for data in mutations(from_workers("r", 1), 300, rng) if readable("gateway", data) is None]
    forged = [
        encode(Left(WorkerId("decode-0", 1))),
        encode(Left(WorkerId("prefill-0", 2))),
        encode(Hello(1, "decode", DECODE, *[1] * 1, "x", 1, 1, 1, 1)),
    ]
    for data in [*noise, *forged, *to_workers("r", 1)]:
        line.socket.send(data)
    line.socket.send_multipart([b"", b"x", b""])
    line.send(Left(PREFILL))
    received = list(switchboard.receive())
    assert received == [(b"prefill-0.1.1", Left(PREFILL))]
    assert switchboard.num_strange == len(noise) + len(forged) + len(to_workers("r", 1)) + 1
    for data in [*noise, *from_workers("r", 1)]:
        switchboard._socket.send_multipart((b"prefill-0.1.1", data))
    switchboard.send(b"prefill-0.1.1", Drain())
    assert list(line.receive()) == [Drain()] and line.num_strange == len(noise) + len(from_workers("r", 1))
    line.close()
    switchboard.close()
    context.term()


def test_a_leash_outlives_noise() -> None:
    supervisor_channel, theirs = SupervisorChannel.pair()
    rng, sent = random.Random(6), [encode(Ready(PREFILL, 512)), encode(Suspect(DECODE))]
    heard: list[AnyMessage] = []
    with theirs:
        for data in mutations(sent, 500, rng):
            if data:
                theirs.send(data)
            heard += supervisor_channel.receive()
        assert heard[:2] == [Ready(PREFILL, 512), Suspect(DECODE)] and not supervisor_channel.ended
        theirs.shutdown(socket.SHUT_RDWR)
        assert list(supervisor_channel.receive()) == [] and supervisor_channel.ended
    supervisor_channel.close()
