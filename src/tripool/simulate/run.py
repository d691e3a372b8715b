"""One run of the fault simulation: a whole deployment under faults, drawn from a seed and checked at every event.

The same seed gives the same events in the same order. After every event the cheap invariants are checked, now and then
the full ones, and at the end that nothing is held anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tripool.engine.fake import FakeTokens, fake_text
from tripool.errors import TripoolError
from tripool.fabric.link import SILENCE_S
from tripool.simulate.checker import Checker
from tripool.simulate.faults import Faults
from tripool.simulate.fleet import ServingFleet
from tripool.simulate.hosts import Hosts
from tripool.simulate.network import Network
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import Scenario, draw
from tripool.simulate.timeline import Timeline
from tripool.simulate.world import TICK_S, World

_FULL_CHECK_EVENTS = 150
_DEADLINE_S = 40.0
"""Virtual time by which everything is over, or something hangs."""
_FREED_S = SILENCE_S + 2.0
"""Longest time that a worker may hold a block after the gateway's death."""


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    num_events: int
    num_requests: int
    num_tokens: int
    virtual_s: float
    trace_hash: int
    faults: Counter[str]
    outcomes: Counter[str]
    seen: Counter[str]
    """What the faults made happen: shows that the checks had something to check."""


def simulate(seed: int, *, faults: bool = True, hosts: int = 1, trace: Callable[[str], None] | None = None) -> Report:
    """One run. Raises AssertionError when a rule is broken."""
    return FaultRun(draw(seed, faults=faults, hosts=hosts), trace).run()


class FaultRun:
    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self._seed = scenario.seed
        self.timeline, rng, text = Timeline(trace), Rng(scenario.seed + 2**32), fake_text()
        tokens = FakeTokens(text)
        self.checker = Checker(self.timeline, scenario.tenants, scenario.may_refuse, tokens.answer)
        network = Network(self.timeline, rng, scenario.workers, Hosts(scenario.num_hosts, scenario.host_of))
        self.fleet = ServingFleet(scenario, self.timeline, rng, network, self.checker, text, tokens, self._step)

        def retry_s(error: TripoolError | None) -> float | None:
            """After a rate limit its minute is over, and so is its client's patience."""
            limited = error is not None and error.code == "rate_limited"
            return None if limited else rng.uniform(0.2, 1.0)

        self.world = World(
            self.timeline, self.fleet, scenario.arrivals, admission=scenario.admission,
            faults=Faults(self.fleet, rng, scenario.faults), retry_s=retry_s, observer=self.checker,
            takeovers=True,
        )  # fmt: skip

    def run(self) -> Report:
        self.fleet.baton.run()
        self.check()
        assert self.world.router is not None
        seen = self.fleet.count() + self.checker.seen
        seen["dropped events of old attempts"] += self.world.router.ledger.num_dropped
        return Report(
            self._seed, self.timeline.num_events, self.checker.num_requests, self.checker.num_tokens,
            self.timeline.now_s, self.timeline.trace_hash, self.fleet.faults, self.checker.outcomes, seen,
        )  # fmt: skip

    def _step(self) -> bool:
        """The next event; False when all is over."""
        timeline, world = self.timeline, self.world
        timeline.over = world.idle and next(self._holders(), None) is None
        if timeline.over:
            return False
        timeline.run(1)
        if timeline.now_s >= _DEADLINE_S:
            raise AssertionError(f"hangs: {self.checker.open_ids}, {list(self._holders())}")
        if world.router is not None:
            known = len(world.router.ledger) + world.admission.num_waiting
            assert known == self.checker.num_open, "the ledger and the clients disagree"
        if timeline.num_events % _FULL_CHECK_EVENTS == 0:
            self.check()
        return True

    def _holders(self) -> Iterator[str]:
        """Who still holds or does something."""
        yield from self.fleet.holders()
        if self.world.router is None:
            yield "no gateway"
        if not self.world.admission.idle:
            yield "admission"

    def check(self) -> None:
        now_s, coordinator = self.timeline.now_s, self.world.router
        self.fleet.check()
        if coordinator is not None:
            coordinator.check(now_s - 2 * TICK_S)
            self.checker.check_admission(self.world.admission)
        elif now_s - self.checker.died_s > _FREED_S:
            busy = [str(run.worker_id) for run in self.fleet.runs() if not run.process.stopped and run.blocks_held]
            assert not busy, f"{busy} hold blocks {_FREED_S:g} s after the gateway's death"
