"""Exchanges between two hosts that share no memory: the rows of one process, whatever happens to the connection."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tripool.experts.exchange import ExpertServer, Floats, Owner, QuantizedRows, SharedView
from tripool.experts.forward import ANSWER, HEAD, REQUEST, Forwarder, routed_record
from tripool.experts.layout import GROUP, LANES, Layout, Memory
from tripool.experts.native_forward import FILE, NativeForwarder

LAYOUT = Layout(ranks=4, layers=2, experts=8, top_k=3, hidden=70, slab_rows=5)
A, B = [True, True, False, False], [False, False, True, True]
TABLE = [expert % 4 for expert in range(8)]
compiled = pytest.mark.skipif(not FILE.exists(), reason="not compiled")


def compute(layer: int, expert: int, rows: QuantizedRows, weight: float) -> Floats:
    total = float((rows.values[0].astype(np.int64) * (np.arange(GROUP * LAYOUT.groups) % 7 + expert)).sum())
    scale = float(rows.scales[0].sum()) + int(rows.fixes[0].sum())
    return (
        np.float32(weight)
        * np.arange(layer + 1, layer + 1 + LAYOUT.hidden, dtype=np.float32)
        * np.float32(total % 1009 + scale)
    )


class Host:
    def __init__(self, here: list[bool], there: list[bool], native: bool = False) -> None:
        self.memory: Memory = np.zeros(LAYOUT.num_bytes, np.uint8)
        self.view = SharedView(LAYOUT, self.memory)
        make: Any = NativeForwarder if native else Forwarder
        self.forwarder = make(*((LAYOUT, self.memory) if native else (self.view,)), here, there)
        self.ranks = [rank for rank in range(LAYOUT.ranks) if here[rank]]
        self.owners = {(rank, lane): Owner(self.view, rank, lane) for rank in self.ranks for lane in range(LANES)}
        self.servers = [ExpertServer(self.view, rank, compute) for rank in self.ranks]
        self.epoch = 1


class Work:
    """One exchange, and what one process would have got."""

    def __init__(self, rng: np.random.Generator) -> None:
        rows = int(rng.integers(1, LAYOUT.slab_rows + 1))
        self.layer, self.rows = int(rng.integers(LAYOUT.layers)), QuantizedRows(
            rng.integers(-127, 128, (rows, GROUP * LAYOUT.groups)).astype(np.int8),
            rng.random((rows, LAYOUT.groups), np.float32),
            rng.integers(-99, 99, (rows, LAYOUT.groups)).astype(np.int32),
        )  # fmt: skip
        self.experts = np.stack([rng.permutation(LAYOUT.experts)[: LAYOUT.top_k] for _ in range(rows)]).astype(np.int32)
        self.weights = rng.random(self.experts.shape, np.float32)
        self.expected = np.array(
            [
                [compute(self.layer, int(e), self.rows[row], w) for e, w in zip(*pair, strict=True)]
                for row, pair in enumerate(zip(self.experts, self.weights, strict=True))
            ]
        )

    def send(self, owner: Owner, table: list[int], epoch: int) -> None:
        owner.dispatch(self.layer, self.rows, self.experts, self.weights, table, epoch)


def records(data: bytes) -> list[tuple[int, ...]]:
    found, at = [], 0
    while at < len(data):
        found.append(HEAD.unpack_from(data, at))
        at += found[-1][1]
    return found


def test_a_row_travels_once_per_host() -> None:
    host, rng = Host(A, B), np.random.default_rng(1)
    work = Work(rng)
    work.experts[:] = [2, 3, 6]  # ranks 2, 3, 2: all of them on the other host
    owner = host.owners[0, 0]
    work.send(owner, TABLE, 1)
    assert owner.ring() == 2
    first = records(host.forwarder.take())
    assert [(head[0], head[5], head[6]) for head in first] == [(REQUEST, 1, len(work.experts))]
    assert owner.ring() == 3
    (second,) = records(host.forwarder.take())
    assert (second[0], second[5], second[6]) == (REQUEST, 1, 0), "the same rows, which are there"
    assert host.forwarder.take() == b""
    host.forwarder.restart()
    (again,) = records(host.forwarder.take())
    assert (again[5], again[6]) == (2, len(work.experts)), "on a new connection both, with their rows once"


def settle(a: Host, b: Host) -> None:
    for here, there in ((a, b), (b, a)):
        assert there.forwarder.put(bytes(here.forwarder.take()))


def answer_all(host: Host) -> None:
    for server in host.servers:
        for request in list(server.requests()):
            if server.answer(request):
                server.ring(request)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=compiled)])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_and_any_broken_connection_gives_the_rows_of_one_process(seed: int, native: bool) -> None:
    """Connections break and what was under way is lost; a rank is given up while it answers late."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    a, b = Host(A, B, native), Host(B, A, native)
    finished = 0
    open_: dict[tuple[int, int], Work] = {}
    epoch, alive, table = 1, [True] * 4, TABLE
    for _ in range(400):
        match chance.randrange(8):
            case 0 | 1:
                host = chance.choice((a, b))
                key = chance.choice(host.ranks), chance.randrange(LANES)
                if key not in open_:
                    open_[key] = Work(rng)
                    open_[key].send(host.owners[key], table, epoch)
            case 2 | 3:
                for host in (a, b):
                    for key, owner in host.owners.items():
                        if key in open_ and chance.random() < 0.5:
                            owner.ring()
            case 4:
                here, there = chance.choice(((a, b), (b, a)))
                data = bytes(here.forwarder.take())
                if chance.random() < 0.2:  # lost with its connection
                    here.forwarder.restart()
                else:
                    assert there.forwarder.put(data)
            case 5 | 6:
                answer_all(chance.choice((a, b)))
            case 7 if chance.random() < 0.2:
                epoch += 1
                lost = chance.randrange(4) if all(alive) else None
                alive = [rank != lost for rank in range(4)]
                table = [rank if alive[rank] else (rank + 1) % 4 for rank in TABLE]
                for host in (a, b):
                    for key, owner in host.owners.items():
                        if key in open_:
                            owner.reassign(table, alive, epoch)
        for host in (a, b):
            for key, owner in host.owners.items():
                if key in open_ and owner.poll():
                    np.testing.assert_array_equal(owner.routed(), open_.pop(key).expected)
                    finished += 1
    for _ in range(40):  # nothing breaks any more: everything ends
        for host in (a, b):
            for key, owner in host.owners.items():
                while key in open_ and owner.ring() is not None:
                    pass
        settle(a, b)
        answer_all(a)
        answer_all(b)
        settle(a, b)
        for host in (a, b):
            for key in [key for key in host.owners if key in open_ and host.owners[key].poll()]:
                np.testing.assert_array_equal(host.owners[key].routed(), open_.pop(key).expected)
    assert not open_ and finished > 10


@compiled
def test_compiled_and_plain_take_and_put_the_same_bytes() -> None:
    rng = np.random.default_rng(5)
    plain, native = (Host(A, B, native=kind) for kind in (False, True))
    far = [Host(B, A, native=kind) for kind in (False, True)]
    for _ in range(20):
        lane, rank = int(rng.integers(LANES)), int(rng.integers(2))
        work = Work(rng)
        for host in (plain, native):
            work.send(host.owners[rank, lane], TABLE, 1)
            while host.owners[rank, lane].ring() is not None:
                pass
        data = plain.forwarder.take()
        assert bytes(native.forwarder.take()) == data and data
        for host in far:
            assert host.forwarder.put(data)
            answer_all(host)
        control = slice(LAYOUT.control, LAYOUT.dispatch_bells)  # signals are the compiled one's only
        far[0].memory[control] = far[1].memory[control]
        assert (far[0].memory == far[1].memory).all()
        back = far[0].forwarder.take()
        assert bytes(far[1].forwarder.take()) == back
        if back:
            assert {head[0] for head in records(back)} == {ANSWER}
        for host in (plain, native):
            assert host.forwarder.put(back)
            answer_all(host)
            assert host.owners[rank, lane].poll()
            np.testing.assert_array_equal(host.owners[rank, lane].routed(), work.expected)
    counts = routed_record(plain.view, 0)
    for host in far:
        assert host.forwarder.put(counts)
        assert (host.view.routed(0) == plain.view.routed(0)).all()


@compiled
def test_damaged_records_are_refused_and_write_no_doorbell_of_others() -> None:
    """A peer has the token, and may still be broken: nothing outside its own slabs is written."""
    rng, chance = np.random.default_rng(9), random.Random(9)
    host = Host(A, B)
    work = Work(rng)
    work.send(host.owners[0, 0], TABLE, 1)
    while host.owners[0, 0].ring() is not None:
        pass
    good = host.forwarder.take() + routed_record(host.view, 1)
    refused = 0
    for _ in range(600):
        data = bytearray(good)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            at = chance.randrange(0, min(len(data), 160))
            data[at] = chance.randrange(256)
        far = [Host(B, A, native=kind) for kind in (False, True)]
        took = [one.forwarder.put(bytes(data)) for one in far]
        assert took[0] == took[1]
        refused += not took[0]
        control = slice(LAYOUT.control, LAYOUT.dispatch_bells)
        far[0].memory[control] = far[1].memory[control]
        assert (far[0].memory == far[1].memory).all()
        for rank in (0, 1):  # of the sender's own host: nobody may ring for them
            assert not any(
                far[1].view.dispatch_bell(rank, source, lane).read().pack()
                for source in range(4)
                for lane in range(LANES)
            )
    assert refused > 200
