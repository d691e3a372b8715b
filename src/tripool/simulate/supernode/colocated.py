"""One engine that does prefill and decode, in virtual time: the real admission and scheduler, measured steps. Pure.

What `tripool serve` runs in one process. Prompts are the very tokens that a server is sent, so that prefixes are found
where it would find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tripool.config import AdmissionConfig, SchedulerConfig
from tripool.core import Request
from tripool.decode import StepFacts
from tripool.engine.scheduler import Scheduler
from tripool.messages import ToWorker, WorkerId
from tripool.router import Emit, Output
from tripool.router.admission_types import Capacity
from tripool.router.held import Held
from tripool.sequence import Sampled, Task
from tripool.simulate.request_table import Arrival, RequestTable
from tripool.simulate.timeline import STEP, Timeline, to_fs
from tripool.simulate.world import World

StepS = Callable[[StepFacts, StepFacts, int], float]
"""How long a step takes, by what it computes, what the one before it did, and how many requests came with it."""

_TICK_S = 0.02
_TOKEN = 1


def simulate_colocated(
    arrivals: Sequence[Arrival], config: SchedulerConfig, step_s: StepS, around_s: float, context_tokens: int
) -> RequestTable:
    """`around_s`: what a first token takes besides its step."""
    timeline = Timeline()
    fleet = ColocatedFleet(timeline, config, step_s, context_tokens)
    world = World(timeline, fleet, arrivals, admission=AdmissionConfig(), tick_s=_TICK_S, to_client_s=around_s)
    world.run()
    return world.table


class ColocatedFleet:
    """One engine in the gateway's process: it is its own router, and there are no messages to workers."""

    world: World[ColocatedFleet]

    def __init__(self, timeline: Timeline, config: SchedulerConfig, step_s: StepS, context_tokens: int) -> None:
        self._timeline, self._step_s, self._max_running = timeline, step_s, config.max_running
        self._scheduler = Scheduler(config, model="simulated", context_tokens=context_tokens)
        self._arrived: list[Request] = []
        self._tasks: list[Task] | None = None
        """Of the step that runs."""
        self._before = StepFacts()
        self._began_s = 0.0

    def new_router(self, gateway_epoch: int) -> ColocatedFleet:
        return self

    def capacity(self, router: ColocatedFleet) -> Capacity:
        return Capacity(1, self._max_running)

    def start(self, world: World[ColocatedFleet]) -> None:
        self.world = world

    def send(self, worker_id: WorkerId, message: ToWorker) -> None:
        raise AssertionError(f"{worker_id}: there is no such worker")

    def suspected(self, worker_id: WorkerId) -> None:
        raise AssertionError(f"{worker_id}: there is no such worker")

    # ---- the router -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float, held: Held | None = None) -> list[Output]:
        assert held is None, "an engine has no standby"
        self._arrived.append(request)
        return self.tick(now_s)

    def cancel(self, request_id: str, now_s: float) -> list[Output]:
        self._arrived = [request for request in self._arrived if request.id != request_id]
        self._scheduler.cancel(request_id)
        return self.tick(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """A step begins with all that was admitted by the present event."""
        if self._tasks is None:
            self._timeline.at(self._timeline.now_fs, STEP, 0, self._begin)
        return []

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._tasks is not None:
            return
        newcomers = len(self._arrived)
        for request in self._arrived:
            self._scheduler.add(request)
        self._arrived = []
        tasks = self._scheduler.schedule() if self._scheduler.busy else []
        if tasks:
            self._tasks, self._began_s = tasks, self._timeline.now_s
            facts, before = StepFacts.of(tasks), self._before
            self._before = facts
            end_fs = self._timeline.now_fs + to_fs(self._step_s(facts, before, newcomers))
            self._timeline.at(end_fs, STEP, 0, self._settle, tasks)

    def _settle(self, tasks: list[Task]) -> None:
        events = self._scheduler.settle(tasks, [Sampled(_TOKEN) if task.samples else None for task in tasks])
        self._scheduler.timed(tasks, self._began_s, self._timeline.now_s)
        self.world.do([Emit(event) for event in events])
        self._tasks = None
        self._begin()
