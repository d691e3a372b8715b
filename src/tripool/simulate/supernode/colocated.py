"""One engine that does prefill and decode, in virtual time: the real admission and scheduler, measured steps. Pure.

What `tripool serve` runs in one process. Prompts are the very tokens that a server is sent, so that prefixes are found
where it would find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tripool.config import AdmissionConfig, SchedulerConfig
from tripool.decode import StepFacts
from tripool.engine.scheduler import Scheduler
from tripool.errors import TripoolError
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Capacity, Decision
from tripool.router.admission_types import Arrival as Prompt
from tripool.sequence import Sampled, Task
from tripool.simulate.request_table import DONE, REFUSED, Arrival, Open, RequestTable
from tripool.simulate.timeline import ARRIVAL, STEP, TICK, Timeline, to_fs

_TICK_S = 0.02
_TOKEN = 1


class ColocatedWorld:
    """`step_s`: how long a step takes, by what it computes, what the one before it did, and how many came with it.
    `around_s`: what a first token takes besides its step."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: SchedulerConfig,
        step_s: Callable[[StepFacts, StepFacts, int], float],
        around_s: float,
        context_tokens: int,
    ) -> None:
        self.timeline, self.table = Timeline(), RequestTable()
        self._scheduler = Scheduler(config, model="simulated", context_tokens=context_tokens)
        self._admission = AdmissionController(AdmissionConfig(), room=Capacity(1, config.max_running))
        self._step_s, self._around_s = step_s, around_s
        self._open: dict[str, Open] = {}
        self._receiver: list[str] = []
        self._tasks: list[Task] | None = None
        self._before = StepFacts()
        self._began_s = 0.0
        self._num_left = len(arrivals)
        for arrival in arrivals:
            self.timeline.at(to_fs(arrival.time_s), ARRIVAL, 0, self._arrive, arrival)
        self.timeline.at(to_fs(_TICK_S), TICK, 0, self._tick)

    def run(self) -> RequestTable:
        while self._num_left and self.timeline.run(1):
            pass
        return self.table

    def _arrive(self, arrival: Arrival) -> None:
        request, now_s = arrival.request, self.timeline.now_s
        self._open[request.id] = Open(arrival, now_s)
        self._decide(self._admission.arrive(Prompt(id=request.id, prompt_tokens=len(request.prompt_ids)), now_s))

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Admit):
                self._receiver.append(decision.id)
            else:
                self._close(decision.id, REFUSED, 0.0, decision.error)
        self._go()

    def _tick(self) -> None:
        self._decide(self._admission.tick(self.timeline.now_s))
        self.timeline.at(self.timeline.now_fs + to_fs(_TICK_S), TICK, 0, self._tick)

    def _go(self) -> None:
        if self._tasks is not None:
            return
        newcomers = len(self._receiver)
        for name in self._receiver:
            self._scheduler.add(self._open[name].arrival.request)
        self._receiver = []
        tasks = self._scheduler.schedule() if self._scheduler.busy else []
        if tasks:
            self._tasks, self._began_s = tasks, self.timeline.now_s
            facts, before = StepFacts.of(tasks), self._before
            self._before = facts
            end_fs = self.timeline.now_fs + to_fs(self._step_s(facts, before, newcomers))
            self.timeline.at(end_fs, STEP, 0, self._settle)

    def _settle(self) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        now_s = self.timeline.now_s
        events = self._scheduler.settle(tasks, [Sampled(_TOKEN) if task.samples else None for task in tasks])
        self._scheduler.timed(tasks, self._began_s, now_s)
        decisions: list[Decision] = []
        for event in events:
            request = self._open[event.request_id]
            if request.first_s is None:
                request.first_s, request.cached_tokens = now_s + self._around_s, event.num_cached_tokens
                uncached = len(request.arrival.request.prompt_ids) - event.num_cached_tokens
                decisions += self._admission.first_token(event.request_id, uncached, now_s)
            if event.finish_reason is not None:
                decisions += self._admission.finished(event.request_id, event.index + 1, now_s)
                self._close(event.request_id, DONE, self._around_s)
        self._decide(decisions)

    def _close(self, name: str, outcome: int, after_s: float, error: TripoolError | None = None) -> None:
        self._num_left -= 1
        self.table.close(self._open.pop(name), outcome, self.timeline.now_s + after_s, error)
