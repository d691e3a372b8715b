"""The plain exchange: every row answered once, by any placement, under delayed doorbells, deaths and late ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from tripool.errors import ExchangeError
from tripool.experts.exchange import (
    Doorbell,
    ExpertServer,
    Owner,
    QuantizedRows,
    SharedView,
    combine,
    raise_fence,
)
from tripool.experts.layout import GROUP, LANES, Bell, Layout, older

HIDDEN = 70


def layout(ranks: int = 3, **changes: int) -> Layout:
    return Layout(**{"layers": 2, "experts": 6, "top_k": 2, "hidden": HIDDEN, "slab_rows": 5} | changes, ranks=ranks)


def compute(layer: int, expert: int, row: QuantizedRows, weight: float) -> np.ndarray:
    """Depends on all that an expert is given."""
    values = row.values[0] * np.repeat(row.scales[0], GROUP) + np.repeat(row.fixes[0], GROUP)
    return ((values[:HIDDEN] * (1 + expert) + 10 * layer) * weight).astype(np.float32)


def random_rows(rng: np.random.Generator, count: int, shape: Layout) -> QuantizedRows:
    return QuantizedRows(
        rng.integers(-127, 128, (count, shape.groups * GROUP), np.int8),
        rng.random((count, shape.groups), np.float32),
        rng.integers(-9, 10, (count, shape.groups), np.int32),
    )


@dataclass
class Exchanged:
    """The rows of one exchange and what their experts give."""

    layer: int
    rows: QuantizedRows
    experts: np.ndarray
    weights: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, shape: Layout) -> Exchanged:
        count = int(rng.integers(0, shape.slab_rows + 1))
        experts = [rng.permutation(shape.experts)[: shape.top_k] for _ in range(count)]
        weights = rng.random((count, shape.top_k), np.float32)
        table = np.array(experts, np.int32).reshape(count, shape.top_k)
        return cls(int(rng.integers(shape.layers)), random_rows(rng, count, shape), table, weights)

    def expected(self) -> np.ndarray:
        return np.array(
            [
                [compute(self.layer, e, self.rows[row], w) for e, w in zip(experts, weights, strict=True)]
                for row, (experts, weights) in enumerate(zip(self.experts.tolist(), self.weights, strict=True))
            ],
            np.float32,
        ).reshape(*self.experts.shape, HIDDEN)

    def dispatch(self, owner: Owner, table: Sequence[int], epoch: int) -> None:
        owner.dispatch(self.layer, self.rows, self.experts, self.weights, table, epoch)


def shared_view(shape: Layout) -> SharedView:
    return SharedView(shape, np.zeros(shape.num_bytes, np.uint8))


def serve(server: ExpertServer) -> int:
    requests = list(server.requests())
    for request in requests:
        assert server.answer(request)
        server.ring(request)
    return len(requests)


@pytest.mark.parametrize("placement", [[0] * 6, [1] * 6, [0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 2]])
def test_any_placement_gives_the_same_rows(placement: list[int]) -> None:
    shape, rng = layout(), np.random.default_rng(3)
    view = shared_view(shape)
    owners = [Owner(view, rank, 0) for rank in range(shape.ranks)]
    servers = [ExpertServer(view, rank, compute) for rank in range(shape.ranks)]
    for _ in range(4):
        work = [Exchanged.draw(rng, shape) for _ in owners]
        for owner, one in zip(owners, work, strict=True):
            one.dispatch(owner, placement, 1)
            sent = []
            while (rank := owner.ring()) is not None:
                sent.append(rank)
            # Each rank at most once, however many of its experts were chosen.
            assert sorted(sent) == sorted({placement[e] for e in one.experts.ravel()})
        for server in servers:
            serve(server)
        for owner, one in zip(owners, work, strict=True):
            assert owner.poll()
            assert np.array_equal(owner.routed(), one.expected())


def test_the_sum_is_in_order_of_choice() -> None:
    routed = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    assert combine(routed, None).tolist() == [[0.0]]
    assert combine(routed[:, [0, 2, 1]], None).tolist() == [[1.0]]
    assert combine(routed[:, [0, 2, 1]], np.array([[2.0]], np.float32)).tolist() == [[3.0]]


def test_two_lanes_are_independent() -> None:
    shape, rng = layout(2), np.random.default_rng(5)
    view, table = shared_view(shape), [1] * 6
    lanes, server = [Owner(view, 0, lane) for lane in range(LANES)], ExpertServer(view, 1, compute)
    work = [Exchanged.draw(rng, shape) for _ in lanes]
    for owner, one in zip(lanes, work, strict=True):
        one.dispatch(owner, table, 1)
        owner.ring()
    assert serve(server) == 2
    for owner, one in zip(lanes, work, strict=True):
        assert owner.poll() and np.array_equal(owner.routed(), one.expected())


def test_a_rank_that_starts_again_goes_on_with_newer_sequences() -> None:
    shape, rng = layout(2), np.random.default_rng(6)
    view, table, one = shared_view(shape), [1] * 6, None
    for start in range(3):
        owner, server = Owner(view, 0, 0), ExpertServer(view, 1, compute)
        one = Exchanged(
            0, random_rows(rng, 2, shape), np.array([[0, 1], [2, 3]], np.int32), np.ones((2, 2), np.float32)
        )
        one.dispatch(owner, table, 1)
        owner.ring()
        assert view.dispatch_bell(1, 0, 0).read() == Bell(1, 4, start + 1)
        assert not owner.poll()
        assert serve(server) == 1 and serve(server) == 0
        assert owner.poll() and np.array_equal(owner.routed(), one.expected())


def test_epochs_and_bells() -> None:
    assert older(0, 1) and not older(1, 1) and older(0xFFFF, 0) and not older(0, 0xFFFF)
    bell = Bell(0xFFFF, 0xFFFE, 0xFFFFFFFD)
    assert Bell.unpack(bell.pack()) == bell


def test_impossible_layouts() -> None:
    with pytest.raises(ExchangeError, match="too many"):
        layout(slab_rows=40_000)
    with pytest.raises(ExchangeError, match="nothing"):
        layout(0)
    memory = np.zeros(layout().num_bytes, np.uint8)
    with pytest.raises(ExchangeError, match="version"):
        Layout.read(memory)
    memory[:56] = layout().header().view(np.uint8)
    assert Layout.read(memory) == layout()
    with pytest.raises(ExchangeError, match="size"):
        Layout.read(memory[:-4096])


# ---- faults -------------------------------------------------------------------------------------------------------


class DelayedView(SharedView):
    """Stores to doorbells become visible late and in any order, but those to one doorbell in their own order."""

    def __init__(self, shape: Layout, memory: np.ndarray) -> None:
        super().__init__(shape, memory)
        self.late: dict[int, deque[Bell]] = {}

    def doorbell(self, at: int) -> Doorbell:
        return _LateDoorbell(self, at, super().doorbell(at))

    def deliver(self, random: Random) -> None:
        if waiting := [at for at, bells in self.late.items() if bells]:
            at = random.choice(waiting)
            super().doorbell(at).ring(self.late[at].popleft())


class _LateDoorbell(Doorbell):
    def __init__(self, view: DelayedView, at: int, real: Doorbell) -> None:
        self._queue, self._real = view.late.setdefault(at, deque()), real

    def read(self) -> Bell:
        return self._real.read()

    def ring(self, bell: Bell) -> None:
        self._queue.append(bell)


@dataclass
class Map:
    table: list[int]
    alive: list[bool]
    epoch: int


@dataclass
class Rank:
    """One process: both its lanes and its expert server, a store at a time."""

    number: int
    view: SharedView
    map: Map
    rng: np.random.Generator
    left: int = 12
    """Exchanges to do."""
    dead: bool = False
    paused: bool = False
    owners: list[Owner] = field(default_factory=list)
    working: list[Exchanged | None] = field(default_factory=lambda: [None] * LANES)

    def __post_init__(self) -> None:
        self.owners = [Owner(self.view, self.number, lane) for lane in range(LANES)]
        self.server = ExpertServer(self.view, self.number, compute)
        self.answering = None

    @property
    def given_up(self) -> bool:
        return not self.map.alive[self.number] or any(owner.fenced for owner in self.owners)

    def own(self, lane: int, random: Random) -> None:
        owner, work = self.owners[lane], self.working[lane]
        if self.given_up:
            return
        if work is None:
            if self.left:
                self.left -= 1
                self.working[lane] = work = Exchanged.draw(self.rng, self.view.layout)
                work.dispatch(owner, self.map.table, self.map.epoch)
        elif random.random() < 0.5:
            owner.ring()
        elif owner.poll():
            assert np.array_equal(owner.routed(), work.expected())
            self.working[lane] = None

    def serve(self, random: Random) -> None:
        """A rank may stop between the payload of an answer and its doorbell."""
        if self.answering is not None:
            self.server.ring(self.answering)
            self.answering = None
        elif requests := list(self.server.requests()):
            request = random.choice(requests)
            self.answering = request if self.server.answer(request) else None

    def adopt(self, newest: Map) -> None:
        if newest.epoch == self.map.epoch:
            return
        self.map = newest
        for owner, work in zip(self.owners, self.working, strict=True):
            if work is not None:
                owner.reassign(newest.table, newest.alive, newest.epoch)

    @property
    def done(self) -> bool:
        return not self.left and not any(self.working)


class World:
    """Ranks in any order, with faults; the newest map reaches each rank at its own time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        shape = layout(self.random.randint(2, 5))
        self.view = DelayedView(shape, np.zeros(shape.num_bytes, np.uint8))
        table = [self.random.randrange(shape.ranks) for _ in range(shape.experts)]
        self.map = Map(table, [True] * shape.ranks, 1)
        self.ranks = [Rank(n, self.view, self.map, np.random.default_rng([seed, n])) for n in range(shape.ranks)]
        self.may_fail = self.random.randrange(shape.ranks)

    def fail(self) -> None:
        rank = self.random.choice(self.ranks)
        if not self.may_fail or rank.dead or rank.paused:
            return
        self.may_fail -= 1
        rank.dead = self.random.random() < 0.5
        rank.paused = not rank.dead

    def notice(self) -> None:
        """What the supervisor does: another map without the silent rank, and a fence before it."""
        for rank in self.ranks:
            if (rank.dead or rank.paused) and self.map.alive[rank.number]:
                alive = [a and n != rank.number for n, a in enumerate(self.map.alive)]
                others = [n for n, a in enumerate(alive) if a]
                table = [r if alive[r] else self.random.choice(others) for r in self.map.table]
                self.map = Map(table, alive, self.map.epoch + 1)
                raise_fence(self.view, rank.number, self.map.epoch)
                return

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.002:
            self.fail()
        elif kind < 0.012:
            self.notice()
        elif kind < 0.02:
            self.random.choice(self.ranks).paused = False
        elif kind < 0.3:
            self.view.deliver(self.random)
        else:
            rank = self.random.choice([r for r in self.ranks if not r.dead and not r.paused] or [self.ranks[0]])
            if rank.dead or rank.paused:
                return
            if self.random.random() < 0.1:
                rank.adopt(self.map)
            elif self.random.random() < 0.5:
                rank.serve(self.random)
            else:
                rank.own(self.random.randrange(LANES), self.random)

    def run(self) -> None:
        for _ in range(60_000):
            if all(r.done or r.dead or r.given_up for r in self.ranks):
                return
            self.step()
        raise AssertionError("a rank waits for ever")


@pytest.mark.parametrize("seed", range(60))
def test_faults_change_no_row(seed: int) -> None:
    World(seed).run()


@pytest.mark.prove
@pytest.mark.parametrize("hundred", range(20))
def test_many_faults_change_no_row(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        World(1000 + seed).run()
