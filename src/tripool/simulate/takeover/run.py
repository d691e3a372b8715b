"""One run of the takeover simulation. The same seed gives the same events in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tripool.engine.fake import FakeTokens, fake_text
from tripool.simulate.checker import Checker
from tripool.simulate.hosts import Hosts
from tripool.simulate.network import Network
from tripool.simulate.rng import Rng
from tripool.simulate.takeover.scenario import TakeoverScenario, draw_takeovers
from tripool.simulate.takeover.world import TakeoverFleet, TakeoverWorld
from tripool.simulate.timeline import Timeline

_FULL_CHECK_EVENTS, _CHECK_EVENTS = 100, 5
_DEADLINE_S = 90.0
"""Virtual time by which everything is over, or something hangs."""


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    num_events: int
    num_tokens: int
    virtual_s: float
    trace_hash: int
    faults: Counter[str]
    outcomes: Counter[str]
    seen: Counter[str]


def simulate_takeovers(seed: int, *, faults: bool = True, trace: Callable[[str], None] | None = None) -> Report:
    """One run. Raises AssertionError when a rule is broken."""
    return TakeoverRun(draw_takeovers(seed, faults=faults), trace).run()


class _Unwatched(Checker):
    """What the fleet tells about one gateway's placements: here there are several who place."""

    def sent_to_worker(self, worker_id: object, message: object) -> None: ...

    def lost(self, worker_id: object) -> None: ...


class TakeoverRun:
    def __init__(self, scenario: TakeoverScenario, trace: Callable[[str], None] | None = None) -> None:
        base, self._seed = scenario.base, scenario.seed
        self.timeline, rng, text = Timeline(trace), Rng(scenario.seed + 2**32), fake_text()
        tokens = FakeTokens(text)
        network = Network(self.timeline, rng, base.workers, Hosts(1, {}))
        checker = _Unwatched(self.timeline, base.tenants, base.may_refuse, tokens.answer)
        self.fleet = TakeoverFleet(base, self.timeline, rng, network, checker, text, tokens, self._step)
        self.world = TakeoverWorld(scenario, self.timeline, rng, network, self.fleet, tokens.answer)
        self.world.begin()

    def run(self) -> Report:
        self.fleet.baton.run()
        self.world.check()
        world = self.world
        return Report(
            self._seed, self.timeline.num_events, world.num_tokens, self.timeline.now_s, self.timeline.trace_hash,
            world.faults, world.outcomes, world.seen + self.fleet.count(),
        )  # fmt: skip

    def _step(self) -> bool:
        timeline, world = self.timeline, self.world
        timeline.over = world.idle and next(self._holders(), None) is None
        if timeline.over:
            return False
        timeline.run(1)
        if timeline.now_s >= _DEADLINE_S:
            raise AssertionError(f"hangs: {list(world.open)}, {list(self._holders())}")
        if timeline.num_events % _CHECK_EVENTS == 0:
            world.check_workers()
        if timeline.num_events % _FULL_CHECK_EVENTS == 0:
            world.check()
            self.fleet.check()
        return True

    def _holders(self) -> Iterator[str]:
        yield from self.fleet.holders()
