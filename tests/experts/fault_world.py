"""The exchange under faults, in a simulation: the code of `experts/exchange.py`, one store at a time, in any order.

Doorbells become visible late and out of order. Ranks die or stop between any two stores, also in the middle of an
answer; they are given up, wake late, are reaped and replaced, while experts move. Every map reaches every rank at its
own time, or never, when a newer one is there. Time is the number of steps: a seed is one history.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tripool.experts.exchange import (
    Doorbell,
    ExpertServer,
    Owner,
    QuantizedRows,
    Replicas,
    Request,
    SharedView,
    raise_fence,
)
from tripool.experts.layout import GROUP, LANES, Bell, Layout, older

HIDDEN = 70
_STEPS = 20_000
"""Of one history; they end after 5,000 at most."""


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

    def dispatch(self, owner: Owner, table: Replicas, epoch: int) -> None:
        owner.dispatch(self.layer, self.rows, self.experts, self.weights, table, epoch)


class DelayedView(SharedView):
    """Stores to doorbells become visible late and in any order, but those to one doorbell in their own order.

    Each rank sees its own stores at once, and has a view of its own.
    """

    def __init__(self, shape: Layout, memory: np.ndarray) -> None:
        super().__init__(shape, memory)
        self.late: dict[int, deque[Bell]] = {}

    def doorbell(self, at: int) -> Doorbell:
        return _LateDoorbell(self, at, super().doorbell(at))

    def deliver(self, random: Random) -> None:
        if waiting := [at for at, bells in self.late.items() if bells]:
            at = random.choice(waiting)
            super().doorbell(at).ring(self.late[at].popleft())

    def deliver_all(self) -> None:
        for at, bells in self.late.items():
            while bells:
                super().doorbell(at).ring(bells.popleft())


class _LateDoorbell(Doorbell):
    def __init__(self, view: DelayedView, at: int, real: Doorbell) -> None:
        self._queue, self._real = view.late.setdefault(at, deque()), real

    def read(self) -> Bell:
        return self._real.read()

    def ring(self, bell: Bell) -> None:
        self._queue.append(bell)


@dataclass(frozen=True)
class Map:
    table: list[tuple[int, int]]
    """One or two replicas of each expert; -1: only one."""
    alive: list[bool]
    epoch: int


class _Died(Exception):
    """In the middle of an answer."""


@dataclass(frozen=True)
class Parts:
    """What ranks are made of; tests plant bugs here."""

    owner: type[Owner] = Owner
    server: type[ExpertServer] = ExpertServer
    reaps_first: bool = True
    """A rank is replaced only after it was reaped."""


@dataclass
class Process:
    """One process of a rank: both its lanes and its expert server, a store at a time."""

    number: int
    view: DelayedView
    parts: Parts
    rng: np.random.Generator
    left: int
    """Exchanges to do."""
    map: Map | None = None
    dead: bool = False
    paused: bool = False
    doomed: bool = False
    """It dies within its next answer."""
    working: list[Exchanged | None] = field(default_factory=lambda: [None] * LANES)
    late_work: set[int] = field(default_factory=set)
    """Lanes whose exchange began when the others had given this rank up."""

    def __post_init__(self) -> None:
        self.owners = [self.parts.owner(self.view, self.number, lane) for lane in range(LANES)]
        self.server = self.parts.server(self.view, self.number, self._compute)
        self.answering: Request | None = None

    def _compute(self, layer: int, expert: int, row: QuantizedRows, weight: float) -> np.ndarray:
        if self.doomed and self.rng.random() < 0.5:
            raise _Died
        return compute(layer, expert, row, weight)

    @property
    def runs(self) -> bool:
        return not self.dead and not self.paused

    @property
    def done(self) -> bool:
        return not self.left and not any(self.working)

    @property
    def given_up(self) -> bool:
        at_work = [owner for owner, work in zip(self.owners, self.working, strict=True) if work is not None]
        return self.map is not None and (not self.map.alive[self.number] or any(owner.fenced for owner in at_work))

    def own(self, lane: int, random: Random) -> None:
        owner, work = self.owners[lane], self.working[lane]
        if self.map is None or self.given_up:
            return
        if work is None:
            if self.left:
                self.left -= 1
                self.working[lane] = work = Exchanged.draw(self.rng, self.view.layout)
                if older(self.map.epoch, int(self.view.fence(self.number)[0])):
                    self.late_work.add(lane)
                work.dispatch(owner, np.array(self.map.table, np.int32), self.map.epoch)
        elif random.random() < 0.5:
            owner.ring()
        elif owner.poll():
            assert np.array_equal(owner.routed(), work.expected()), "a row is wrong"
            assert not work.experts.size or lane not in self.late_work, "a rank that was given up got answers"
            self.working[lane] = None
            self.late_work.discard(lane)

    def serve(self, random: Random) -> None:
        """A rank may stop between the payload of an answer and its doorbell."""
        if self.answering is not None:
            self.server.ring(self.answering)
            self.answering = None
        elif requests := list(self.server.requests()):
            request = random.choice(requests)
            try:
                self.answering = request if self.server.answer(request) else None
            except _Died:
                self.dead = True

    def adopt(self, newest: Map) -> None:
        """As `control/rank.py`: the first map must name this rank; those that are gone are fenced."""
        if (self.map is None and not newest.alive[self.number]) or newest == self.map:
            return
        for number, alive in enumerate(newest.alive):
            if not alive:
                raise_fence(self.view, number, newest.epoch)
        self.map = newest
        for owner, work in zip(self.owners, self.working, strict=True):
            if work is not None:
                owner.reassign(np.array(newest.table, np.int32), newest.alive, newest.epoch)


class World:
    """A supervisor and its ranks."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        self.random, self.parts, self.seed = Random(seed), parts or Parts(), seed
        shape = layout(self.random.randint(2, 5))
        self.memory = np.zeros(shape.num_bytes, np.uint8)
        self.layout = shape
        everybody = list(range(shape.ranks))
        self.map = Map([self._replicas(everybody) for _ in range(shape.experts)], [True] * shape.ranks, 1)
        self.processes: list[Process] = []
        """The newest of each rank."""
        for number in range(shape.ranks):
            self.processes.append(self._start(number, 12))
            self.processes[number].adopt(self.map)
        self.old: list[Process] = []
        """Replaced before they were reaped."""
        self.may_fail = self.random.randrange(1, 5)
        self.replaces = self.random.random() < 0.7
        """Otherwise the others go on without what is gone."""
        self.num_faults = self.num_steps = 0

    def _start(self, number: int, left: int) -> Process:
        rng = np.random.default_rng([self.seed, number, self.map.epoch])
        return Process(number, DelayedView(self.layout, self.memory), self.parts, rng, left)

    def _replicas(self, ranks: list[int]) -> tuple[int, int]:
        if len(ranks) < 2 or self.random.random() < 0.5:
            return self.random.choice(ranks), -1
        first, second = self.random.sample(ranks, 2)
        return first, second

    def _change(self, number: int, *, alive: bool) -> None:
        living = [alive if n == number else a for n, a in enumerate(self.map.alive)]
        others = [n for n, a in enumerate(living) if a]
        table = []
        for replicas in self.map.table:
            left = [rank for rank in replicas if rank >= 0 and living[rank]] or [self.random.choice(others)]
            table.append((left[0], left[1] if len(left) > 1 else -1))
        self.map = Map(table, living, self.map.epoch + 1)

    # ---- events -----------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Some rank is always left; without a successor of another it must hold all experts."""
        healthy = [p for p in self.processes if p.runs and not p.doomed and p.map and self.map.alive[p.number]]
        if not self.may_fail or len(healthy) < 2:
            return
        self.may_fail -= 1
        self.num_faults += 1
        process = self.random.choice(healthy)
        how = self.random.randrange(4)
        process.dead, process.doomed, process.paused = how == 0, how == 1, how > 1

    def notice(self) -> None:
        """Another map without a rank that is dead or silent. It stays until it is reaped, and may wake up."""
        for process in self.processes:
            if not process.runs and self.map.alive[process.number] and sum(self.map.alive) > 1:
                self._change(process.number, alive=False)
                return

    def wake(self) -> None:
        for process in (*self.processes, *self.old):
            process.paused = process.paused and self.random.random() < 0.5

    def replace(self) -> None:
        """What a rank left to do is placed again; here, at its successor."""
        gone = [p for p in self.processes if not self.map.alive[p.number]]
        if gone and self.replaces:
            last = self.random.choice(gone)
            if self.parts.reaps_first:
                last.dead = True
                last.view.deliver_all()  # the end of a process is after all its stores
            else:
                self.old.append(last)
            left = last.left + sum(work is not None for work in last.working)
            self.processes[last.number] = self._start(last.number, left)
            self._change(last.number, alive=True)

    def move(self) -> None:
        """Replicas of an expert on any other ranks: nothing that was sent is sent again."""
        living = [n for n, alive in enumerate(self.map.alive) if alive]
        table = list(self.map.table)
        table[self.random.randrange(len(table))] = self._replicas(living)
        self.map = Map(table, self.map.alive, self.map.epoch + 1)

    def step(self) -> None:
        kind, everybody = self.random.random(), (*self.processes, *self.old)
        if kind < 0.002:
            self.fail()
        elif kind < 0.012:
            self.notice()
        elif kind < 0.015:
            self.wake()
        elif kind < 0.018:
            self.replace()
        elif kind < 0.022:
            self.move()
        elif kind < 0.3:
            self.random.choice(everybody).view.deliver(self.random)
        elif runs := [process for process in everybody if process.runs]:
            process = self.random.choice(runs)
            if self.random.random() < 0.04:
                process.adopt(self.map)
            elif self.random.random() < 0.5:
                process.serve(self.random)
            else:
                process.own(self.random.randrange(LANES), self.random)

    def run(self) -> None:
        """Until every rank has done its exchanges, its successors included. AssertionError: the protocol is broken."""
        for self.num_steps in range(_STEPS):
            waiting = [p for p in self.processes if not (p.done and p.runs)]
            if not any(self.replaces or self.map.alive[process.number] for process in waiting):
                return
            self.step()
        raise AssertionError("a rank waits for ever")
