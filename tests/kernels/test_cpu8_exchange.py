"""Experts over ranks in C: the bits of one process, and the protocol of the plain exchange.

Several ranks of one process: each has its own expert thread and its own layers over one set of weights. Only one of
them at a time runs a step; the others are idle, and answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from tripool.errors import ExchangeError, RankFenced
from tripool.experts.exchange import ExpertServer, Owner, QuantizedRows, SharedView, combine
from tripool.experts.layout import Bell, Layout
from tripool.kernels.cpu8.exchange import NativeExchange
from tripool.kernels.cpu8.library import library, set_threads
from tripool.kernels.cpu8.sublayers import Moe8
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.weights import MlpWeights, MoeWeights, Norm

HIDDEN, EXPERTS, TOP_K, WIDTH = 72, 8, 3, 40
DEADLINE_S = 60.0


def weights(seed: int, *, shared: bool = True) -> MoeWeights:
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * 0.3

    norm = Norm(1 + randn(HIDDEN), 1e-5)
    dense = MlpWeights(norm=norm, gate_up=randn(66, HIDDEN), gate_up_bias=None, down=randn(HIDDEN, 33), down_bias=None)
    plan = RoutePlan(top_k=TOP_K, score="sigmoid", groups=1, top_groups=1, group_top=1, normalise=True, scaling=1.5)
    return MoeWeights(
        norm=norm,
        gate=randn(EXPERTS, HIDDEN) * 5,
        gate_bias=randn(EXPERTS),
        gate_up=randn(EXPERTS, 2 * WIDTH, HIDDEN),
        down=randn(EXPERTS, HIDDEN, WIDTH),
        shared=dense if shared else None,
        plan=plan,
    )


def layout(ranks: int, slab_rows: int = 16) -> Layout:
    return Layout(ranks=ranks, layers=2, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, slab_rows=slab_rows)


class Ranks:
    """`native`: how many of the ranks are in C; the others have memory only."""

    def __init__(
        self, shape: Layout, native: int, deadline_s: float = DEADLINE_S, memory: np.ndarray | None = None
    ) -> None:
        self.layout, self.memory = shape, np.zeros(shape.num_bytes, np.uint8) if memory is None else memory
        self.view = SharedView(shape, self.memory)
        self.layers = [[Moe8(weights(1)), Moe8(weights(2, shared=False))] for _ in range(native)]
        self.exchanges = [
            NativeExchange(shape, self.memory, rank, layers, deadline_s) for rank, layers in enumerate(self.layers)
        ]

    def install(self, epoch: int, table: np.ndarray, lost: Sequence[int] = ()) -> None:
        for exchange in self.exchanges:
            exchange.install(epoch, table, [rank not in lost for rank in range(self.layout.ranks)])

    def run(self, rank: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        self.layers[rank][layer](y)
        return y


@contextmanager
def ranks(shape: Layout, native: int | None = None, **options: Any) -> Iterator[Ranks]:
    made = Ranks(shape, shape.ranks if native is None else native, **options)
    try:
        yield made
    finally:
        for exchange in made.exchanges:
            exchange.close()


def alone(layer: int, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    Moe8(weights(layer + 1, shared=layer == 0))(y)
    return y


def placement(kind: str, num_ranks: int, seed: int = 0) -> np.ndarray:
    if kind == "blocks":
        row = np.arange(EXPERTS) * num_ranks // EXPERTS
    elif kind == "last":
        row = np.full(EXPERTS, num_ranks - 1)
    else:
        return np.random.default_rng(seed).integers(num_ranks, size=(2, EXPERTS)).astype(np.int32)
    return np.stack([row, row]).astype(np.int32)


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    set_threads(request.param)
    yield
    set_threads(1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kind", ["blocks", "last", "random"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_gives_the_bits_of_one_process(num_ranks: int, kind: str) -> None:
    rng = torch.Generator().manual_seed(9)
    with ranks(layout(num_ranks)) as group:
        for epoch in (1, 2):
            group.install(epoch, placement(kind, num_ranks, epoch))
            for rank in range(num_ranks):
                for layer, count in ((0, 1), (1, 3), (0, 16), (1, 17), (0, 41)):
                    x = torch.randn(count, HIDDEN, generator=rng)
                    assert torch.equal(group.run(rank, layer, x), alone(layer, x))


def replicated(num_ranks: int, seed: int) -> np.ndarray:
    """[layers, experts, most replicas]: one to all ranks hold an expert."""
    rng = np.random.default_rng(seed)
    table = np.full((2, EXPERTS, num_ranks), -1, np.int32)
    for cell in table.reshape(-1, num_ranks):
        some = np.sort(rng.permutation(num_ranks)[: rng.integers(1, num_ranks + 1)])
        cell[: len(some)] = some
    return table


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_any_replica_gives_the_bits_of_one_process(num_ranks: int) -> None:
    """Rows of an expert are split: some exchanges have more than 16 of one."""
    rng = torch.Generator().manual_seed(10)
    with ranks(layout(num_ranks, slab_rows=64)) as group:
        for epoch in (1, 2, 3):
            group.install(epoch, replicated(num_ranks, epoch))
            for rank in range(num_ranks):
                for layer, count in ((0, 1), (1, 9), (0, 64), (1, 130)):
                    x = torch.randn(count, HIDDEN, generator=rng)
                    assert torch.equal(group.run(rank, layer, x), alone(layer, x))
        for layer in (0, 1):
            routed = sum(int(group.view.routed(rank)[layer].sum()) for rank in range(num_ranks))
            assert group.view.assigned(layer).sum() == routed


def test_each_rank_may_have_a_map_of_its_own() -> None:
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))
    with ranks(layout(4)) as group:
        for rank, exchange in enumerate(group.exchanges):
            exchange.install(1, placement("random", 4, rank), [True] * 4)
        for rank in range(4):
            assert torch.equal(group.run(rank, 0, x), alone(0, x))


def compute_of(layers: Sequence[Moe8]):
    def compute(layer: int, expert: int, row: QuantizedRows, weight: float) -> np.ndarray:
        y, parts = np.empty(HIDDEN, np.float32), [np.ascontiguousarray(p) for p in (row.values, row.scales, row.fixes)]
        library().tripool_expert(layers[layer].at, expert, *(p.ctypes.data for p in parts), weight, y.ctypes.data)
        return y

    return compute


def test_the_plain_server_answers_a_compiled_owner_alike() -> None:
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(4))
    with ranks(layout(2), native=1) as group:
        group.install(7, placement("last", 2))
        results: list[torch.Tensor] = []
        server = ExpertServer(group.view, 1, compute_of(group.layers[0]))
        thread = Thread(target=lambda: results.append(group.run(0, 0, x)))
        thread.start()
        served, deadline = 0, monotonic() + DEADLINE_S
        while thread.is_alive() and monotonic() < deadline:
            for request in list(server.requests()):
                assert request.bell.epoch == 7 and server.answer(request)
                server.ring(request)
                served += 1
        thread.join(DEADLINE_S)
        assert served == 3  # of at most 16 rows
        assert torch.equal(results[0], alone(0, x))


def test_a_compiled_server_answers_the_plain_owner_alike() -> None:
    """The plain owner dispatches again what the compiled one left in its slab, and adds it up itself."""
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    with ranks(layout(3)) as group:
        table = placement("random", 3, 8)
        group.install(1, table)
        expected = group.run(0, 1, x)
        slabs = [group.view.slab(0, lane) for lane in (0, 1)]
        slab = next(slab for slab in slabs if slab.head[0]["rows"] == 9)
        experts, given = np.zeros((9, TOP_K), np.int32), np.zeros((9, TOP_K), np.float32)
        entries = slab.entries[: 9 * TOP_K]
        experts[entries["row"], entries["choice"]] = entries["expert"]
        given[entries["row"], entries["choice"]] = entries["weight"]
        rows = QuantizedRows(*(part[:9].copy() for part in (slab.rows.values, slab.rows.scales, slab.rows.fixes)))
        counted = group.view.routed(0)[1].copy()
        assert counted.sum() == 9 * TOP_K and not group.view.routed(0)[0].any()
        for source, lane in ((0, 0), (2, 1)):
            owner = Owner(group.view, source, lane)
            owner.dispatch(1, rows, experts, given, table[1].tolist(), 1)
            while owner.ring() is not None:
                pass
            # Python's store wakes no thread: what an idle server misses it finds after 50 ms.
            deadline = monotonic() + DEADLINE_S
            while not owner.poll():
                assert monotonic() < deadline
            assert torch.equal(x + torch.from_numpy(combine(owner.routed(), None)), expected)
        assert np.array_equal(group.view.routed(2)[1], counted), "both count the rows of each expert"


def test_a_silent_rank_is_replaced_and_its_late_answer_ignored() -> None:
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(6))
    with ranks(layout(3), native=2) as group:
        silent = ExpertServer(group.view, 2, compute_of(group.layers[0]))
        group.install(1, placement("random", 3, 3))
        results: list[torch.Tensor] = []
        thread = Thread(target=lambda: results.append(group.run(0, 0, x)))
        thread.start()
        deadline = monotonic() + DEADLINE_S
        while not (late := list(silent.requests())):
            assert monotonic() < deadline
        assert group.exchanges[0].silence_s()[2] > 0.0
        group.exchanges[1].fence(2, 2)
        group.install(2, placement("random", 2, 4), lost=[2])
        thread.join(DEADLINE_S)
        assert torch.equal(results[0], alone(0, x))
        assert not any(group.exchanges[0].silence_s())
        silent.answer(late[0])  # it wakes up: its slab is its own, and its doorbell has an old epoch
        silent.ring(late[0])
        for rank in (0, 1):
            assert torch.equal(group.run(rank, 0, x), alone(0, x))
        woken = Owner(group.view, 2, 0)
        rows = QuantizedRows(np.zeros((1, 128), np.int8), np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32))
        woken.dispatch(0, rows, np.zeros((1, TOP_K), np.int32), np.ones((1, TOP_K), np.float32), [0] * EXPERTS, 1)
        woken.ring()
        assert woken.fenced and not list(ExpertServer(group.view, 0, compute_of(group.layers[0])).requests())


def test_a_fenced_rank_stops() -> None:
    x = torch.randn(2, HIDDEN)
    with ranks(layout(2), native=1) as group:
        group.install(1, placement("last", 2))
        group.exchanges[0].fence(0, 2)
        with pytest.raises(RankFenced):
            group.run(0, 0, x)


def test_a_wait_has_a_deadline() -> None:
    with ranks(layout(2), native=1, deadline_s=0.05) as group:
        group.install(1, placement("last", 2))
        with pytest.raises(ExchangeError, match="in time"):
            group.run(0, 0, torch.randn(2, HIDDEN))
        assert not any(group.exchanges[0].silence_s())
        group.install(2, placement("blocks", 1), lost=[1])
        x = torch.randn(2, HIDDEN)
        assert torch.equal(group.run(0, 0, x), alone(0, x))


@pytest.mark.parametrize("last", [5, 2**31 + 9, 2**32 - 1])
def test_a_new_process_goes_on_with_newer_sequences(last: int) -> None:
    """Also in the second half of the numbers, and after the last; the other rank was never asked."""
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(13))
    shape = layout(3)
    memory = np.zeros(shape.num_bytes, np.uint8)
    view = SharedView(shape, memory)
    for lane in (0, 1):
        for bell in (view.dispatch_bell(2, 0, lane), view.combine_bell(0, 2, lane)):
            bell.ring(Bell(1, 4, last))
    with ranks(shape, memory=memory) as group:
        group.install(2, placement("last", 3))
        assert torch.equal(group.run(0, 0, x), alone(0, x))
        assert (last + 1) % 2**32 in {view.dispatch_bell(2, 0, lane).read().sequence for lane in (0, 1)}


def test_another_model_is_refused() -> None:
    shape = layout(1)
    with pytest.raises(ExchangeError, match="another model"):
        NativeExchange(shape, np.zeros(shape.num_bytes, np.uint8), 0, [Moe8(weights(1))])


LOST_3 = [[1, -1, -1], [2, -1, -1], [3, -1, -1], [1, 2, 3], [2, 3, -1], [1, 3, -1], [3, -1, -1], [1, 2, -1]]
AFTER_3 = [[1, -1], [2, -1], [2, -1], [1, 2], [2, -1], [1, 2], [1, -1], [1, 2]]


def test_both_owners_write_the_same_slab_and_doorbells() -> None:
    """A rank without experts sends all its rows. Entry by entry, also after a rank is lost and they are sent again."""
    x = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(12))
    with ranks(layout(4), native=1) as group:
        first, second = np.array([LOST_3] * 2, np.int32), np.array([AFTER_3] * 2, np.int32)
        group.view.assigned(0)[:] = (9, 3000, 2900, 2000)  # what others have sent
        group.install(3, first)
        thread = Thread(target=lambda: group.run(0, 0, x))
        thread.start()
        silent = [ExpertServer(group.view, rank, compute_of(group.layers[0])) for rank in (1, 2, 3)]
        deadline = monotonic() + DEADLINE_S
        while not all(list(server.requests()) for server in silent):
            assert monotonic() < deadline
        lane = next(request.lane for request in silent[0].requests())
        slab, plain = group.view.slab(0, lane), SharedView(group.layout, np.zeros_like(group.memory))
        count, owner = 11 * TOP_K, Owner(plain, 0, lane)
        experts, given = np.zeros((11, TOP_K), np.int32), np.zeros((11, TOP_K), np.float32)
        entries = slab.entries[:count].copy()
        experts[entries["row"], entries["choice"]] = entries["expert"]
        given[entries["row"], entries["choice"]] = entries["weight"]
        rows = QuantizedRows(*(part[:11].copy() for part in (slab.rows.values, slab.rows.scales, slab.rows.fixes)))
        plain.assigned(0)[:] = (9, 3000, 2900, 2000)
        owner.dispatch(0, rows, experts, given, first[0], 3)
        check_same_requests(group.view, plain, owner, lane, count)
        for server in silent[:2]:  # the third is lost without an answer
            for request in list(server.requests()):
                assert server.answer(request)
                server.ring(request)
                plain.combine_bell(0, server.rank, lane).ring(request.bell)
        group.install(4, second, lost=[3])
        while not all(list(server.requests()) for server in silent[:2]):
            assert monotonic() < deadline
        assert not owner.poll()
        owner.reassign(second[0], [True, True, True, False], 4)
        check_same_requests(group.view, plain, owner, lane, count)
        for server in silent[:2]:
            for request in list(server.requests()):
                assert server.answer(request)
                server.ring(request)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def check_same_requests(compiled: SharedView, plain: SharedView, owner: Owner, lane: int, count: int) -> None:
    while owner.ring() is not None:
        pass
    slabs = compiled.slab(0, lane), plain.slab(0, lane)
    assert slabs[0].head[0] == slabs[1].head[0]
    assert slabs[0].entries[:count].tobytes() == slabs[1].entries[:count].tobytes()
    assert compiled.assigned(0).tolist() == plain.assigned(0).tolist()
    for rank in (1, 2, 3):
        assert slabs[0].segments[rank] == slabs[1].segments[rank]
        assert compiled.dispatch_bell(rank, 0, lane).read() == plain.dispatch_bell(rank, 0, lane).read()
