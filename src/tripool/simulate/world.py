"""A whole deployment in virtual time: the real coordinator, real schedulers, the real cache index, and faults. Pure.

A heap of events, each at its time; the same seed gives the same events in the same order. After every event the cheap
invariants are checked, after every fifty the full ones, and at the end that nothing is held anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from tripool.core import Request
from tripool.errors import TripoolError
from tripool.messages import AnyMessage, Reaped, Tokens, WorkerId
from tripool.router import Coordinator, Emit, Fail, Output, Send, ToSupervisor
from tripool.simulate.admission import SimAdmission
from tripool.simulate.checker import Checker
from tripool.simulate.clock import Clock
from tripool.simulate.kv_sender import KvSender
from tripool.simulate.network import Network
from tripool.simulate.pool import CacheMember
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import Arrival, Scenario
from tripool.simulate.worker import SimWorker, WorkerSpec

_TICK_S = 0.05
_FULL_CHECK_EVENTS = 50
_POLL_S = 0.001
"""From a message's arrival to its being read by a worker that is idle."""
_DEADLINE_S = 40.0
"""Virtual time by which everything is over, or something hangs."""
_FREED_S = 5.0
"""After the gateway's death nobody may hold a block for longer."""


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


@dataclass(slots=True, eq=False)
class Place:
    """Where a worker lives, one life after another."""

    name: str
    spec: WorkerSpec
    epoch: int = 0
    process: SimWorker | None = None
    stopped: bool = False
    version: int = 0
    """Of the newest plan to wake it; older ones are void."""
    wake_s: float = 0.0
    ending: bool = False
    """The supervisor has decided to end this life."""

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.name, self.epoch)


class World:
    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.clock = Clock(trace)
        self.rng = Rng(scenario.seed + 2**32)
        self.checker = Checker(scenario.may_refuse)
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_events = 0
        self.members = [
            CacheMember(scenario.member_slots, f"cache-{n}", scenario.disk) for n in range(scenario.num_members)
        ]
        self.places = {name: Place(name, spec) for name, spec in scenario.workers.items()}
        self.network = Network(self.clock, self.rng, list(self.places), self._reach_worker, self._reach_gateway)
        self.coordinator: Coordinator | None = None
        self.admission = self._new_admission()
        self._senders: dict[str, KvSender] = {}
        self._reaped: list[WorkerId] = []
        self._gateway_epoch = 0
        self._gateway_died_s = 0.0

    # ---- time -------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        self.start_gateway()
        for place in self.places.values():
            self._start(place)
        for member in self.members:
            self.clock.at(0.0, self._expire, member)
        for arrival in self.scenario.arrivals:
            self.clock.expect(arrival.time_s, self._arrive, arrival)
        while self.clock.num_pending or not self._is_over():
            self._step()
        return self._report()

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def _step(self) -> None:
        self.clock.step()
        assert self.clock.now_s < _DEADLINE_S, f"hangs: {self.checker.open_ids}, {self._holders()}"
        self.num_events += 1
        if self.coordinator is not None:
            known = len(self.coordinator.ledger) + len(self.admission)
            assert known == self.checker.num_open, "the ledger and the clients disagree"
        if self.num_events % _FULL_CHECK_EVENTS == 0:
            self.check()

    def _is_over(self) -> bool:
        """Nothing is to come, every request has ended, and nothing is held."""
        if self.clock.num_pending or self.checker.num_open or self.coordinator is None:
            return False
        return not self._holders()

    def _holders(self) -> list[str]:
        found = [p.name for p in self.places.values() if p.process is None or not p.process.holds_nothing]
        held = [m for m in self.members if not m.up or m.index.num_leases or m.index.num_reserved]
        return [*found, *("cache" for _ in held), *([] if self.admission.idle else ["door"])]

    def check(self) -> None:
        if self.coordinator is not None:
            self.coordinator.check(self.now_s - 2 * _TICK_S)
            self.admission.check(self.now_s)
        for place in self.places.values():
            if place.process is not None:
                place.process.check()
        for member in self.members:
            member.check()
        if self.coordinator is None and self.now_s - self._gateway_died_s > _FREED_S:
            busy = [p.name for p in self.places.values() if p.process and not p.stopped and p.process.blocks_held]
            assert not busy, f"{busy} hold blocks {_FREED_S:g} s after the gateway's death"

    def _report(self) -> Report:
        self.check()
        assert self.coordinator is not None
        for place in self.places.values():
            assert place.process is not None
            self._remember(place.process)
        self.seen += self.network.seen
        for member in self.members:
            member.remember()
            self.seen += member.seen
        self.seen["dropped events of old attempts"] += self.coordinator.ledger.num_dropped
        self.seen["waited at the door"] += self.admission.num_waited
        return Report(
            self.scenario.seed,
            self.num_events,
            self.checker.num_requests,
            self.checker.num_tokens,
            self.now_s,
            self.clock.trace_hash,
            self.faults,
            self.checker.outcomes,
            self.seen,
        )

    # ---- clients and gateway ----------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        if self.coordinator is None:
            self.seen["turned away by no gateway"] += 1
            self.clock.expect(self.now_s + 0.3, self._arrive, arrival)
            return
        self.clock.note(f"{request.id} arrives")
        self.checker.arrived(request)
        self.admission.arrive(request, self.now_s)
        if arrival.cancel_s is not None:
            self.clock.expect(self.now_s + arrival.cancel_s, self._cancel, request.id)

    def _ask_again(self, request: Request) -> None:
        """What a client does that was refused or cut off: a new request, in a while."""
        again = replace(request, id=f"{request.id}+")
        arrival = Arrival(self.now_s + self.rng.uniform(0.2, 1.0), again, None)
        self.clock.expect(arrival.time_s, self._arrive, arrival)

    def _cancel(self, request_id: str) -> None:
        if self.coordinator is not None:
            self.clock.note(f"{request_id} is cancelled")
            self.checker.cancelled(request_id)
            if self.admission.gone(request_id, self.now_s):
                self.seen["cancelled at the door"] += 1
            else:
                self.do(self.coordinator.cancel(request_id, self.now_s))

    def _new_admission(self) -> SimAdmission:
        entry = self.scenario.entry
        return SimAdmission(
            entry.admission,
            entry.tenants,
            self.now_s,
            minds_slots=entry.minds_slots,
            admit=self._admitted,
            refuse=self._refused,
        )

    def _admitted(self, request: Request) -> None:
        assert self.coordinator is not None
        self.clock.note(f"{request.id} is let through")
        self.do(self.coordinator.submit(request, self.now_s))

    def _refused(self, request: Request, error: TripoolError) -> None:
        self.clock.note(f"{request.id} is refused: {error.code}")
        self.checker.refused(request, error)
        if error.code != "rate_limited":  # else its minute is over, and so is its client's patience
            self._ask_again(request)

    def start_gateway(self) -> None:
        self._gateway_epoch += 1
        self.admission = self._new_admission()
        self.coordinator = Coordinator(self.scenario.router, gateway_epoch=self._gateway_epoch)
        self.clock.at(self.now_s + _TICK_S, self._tick, self._gateway_epoch)
        for place in self.places.values():
            self.network.mend_link(place.name)

    def _tick(self, epoch: int) -> None:
        if self.coordinator is not None and epoch == self._gateway_epoch:
            self.do(self.coordinator.tick(self.now_s))
            self.admission.tick(self.coordinator, self.now_s)
            self.clock.at(self.now_s + _TICK_S, self._tick, epoch)

    def do(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send():
                    self.checker.told(output.worker_id, output.message)
                    self.network.send_to_worker(output.worker_id, output.message)
                case Emit():
                    event = output.event
                    self.clock.note(f"{event.request_id}.{event.choice}[{event.index}] = {event.token_id}")
                    request = self.checker.request(event.request_id)
                    self.checker.token(event)
                    self.admission.token(request, event, self.now_s)
                case Fail():
                    self.clock.note(f"{output.request_id} fails: {output.error.code}")
                    self._ask_again(self.checker.failed(output.request_id, output.error))
                    self.admission.gone(output.request_id, self.now_s)
                case ToSupervisor():
                    worker_id = output.message.worker_id
                    self.clock.note(f"{worker_id} is suspected")
                    self.seen["suspected"] += 1
                    self.checker.lost(worker_id)
                    self.end_later(self.places[worker_id.name], self.rng.uniform(0.0, 0.5), worker_id)

    def _reach_worker(self, worker_id: WorkerId, session: int, message: AnyMessage) -> None:
        place = self.places[worker_id.name]
        process = place.process
        if process is None or (process.worker_id, process.session) != (worker_id, session):
            return
        self.clock.note(f"{type(message).__name__} reaches {worker_id}")
        process.receiver.append(message)
        soon_s = self.clock.now_s + _POLL_S
        if not process.stepping and place.wake_s > soon_s:
            self._wake_at(place, soon_s)

    def _reach_gateway(self, worker_id: WorkerId, message: AnyMessage) -> None:
        if self.coordinator is None:
            return
        self.clock.note(f"{type(message).__name__} from {worker_id}")
        if isinstance(message, Tokens) and worker_id not in self.coordinator.view:
            self.seen["tokens of an untrusted life"] += 1
        outputs = self.coordinator.receive(message, self.clock.now_s)
        if isinstance(message, Tokens):
            brought = {(s.event.request_id, s.event.choice, s.event.index): s.attempt for s in message.events}
            for output in outputs:
                if isinstance(output, Emit):
                    event = output.event
                    attempt = brought[event.request_id, event.choice, event.index]
                    self.checker.source(event, worker_id, attempt)
        self.do(outputs)

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self, place: Place) -> None:
        place.epoch += 1
        place.stopped = place.ending = False
        process = place.process = SimWorker(
            place.worker_id,
            place.spec,
            self.members,
            self._senders,
            lambda message: self.network.send_to_gateway(process.worker_id, process.session, message),
        )
        self.clock.note(f"{place.name}.{place.epoch} starts")
        self._wake_at(place, self.now_s)

    def _wake_at(self, place: Place, time_s: float) -> None:
        place.version += 1
        place.wake_s = time_s
        self.clock.at(time_s, self._wake, place, place.version)

    def _wake(self, place: Place, version: int) -> None:
        process = place.process
        if process is None or version != place.version or place.stopped:
            return
        next_s = process.turn(self.clock.now_s)
        if process.exited:
            self.clock.note(f"{place.name}.{place.epoch} leaves")
            self._end(place, place.worker_id)
        else:
            self._wake_at(place, next_s)

    def end_later(self, place: Place, delay_s: float, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and not place.ending:
            place.ending = True
            self.clock.expect(self.now_s + delay_s, self._end, place, worker_id)

    def _end(self, place: Place, worker_id: WorkerId) -> None:
        """Killed, or gone by itself; the supervisor reaps it and starts the next life."""
        if place.worker_id != worker_id or place.process is None:
            return
        self._remember(place.process)
        place.process = None
        place.ending = True
        if self.rng.chance(0.5):
            self.network.lose_sent(place.name)
        self.clock.expect(self.now_s + self.rng.uniform(0.002, 0.05), self._reap, place, worker_id)

    def _remember(self, process: SimWorker) -> None:
        self.seen += process.seen
        self.seen["preempted"] += process.scheduler.num_preemptions
        self.seen["blocks fetched from the cache"] += process.pool.num_fetched
        self.seen["blocks stored in the cache"] += process.pool.num_stored
        self.seen["bad blocks in the cache"] += process.pool.num_bad
        self.seen["waited for blocks from disk"] += process.pool.num_waited

    def _reap(self, place: Place, worker_id: WorkerId) -> None:
        self.clock.note(f"{worker_id} is reaped")
        self._reaped.append(worker_id)
        self.checker.lost(worker_id)
        self._senders.pop(str(worker_id))
        if self.coordinator is not None:
            self.do(self.coordinator.receive(Reaped(worker_id), self.now_s))
        for member in self.members:
            if member.up:
                member.index.reaped(worker_id)
                member.settle()
        self.clock.expect(self.now_s + self.rng.uniform(0.05, 0.4), self._start, place)

    def _expire(self, member: CacheMember) -> None:
        now_s = self.clock.now_s
        if member.up:
            member.index.expire(now_s)
            member.settle()
            member.turn(now_s)
        self.clock.at(now_s + 0.1, self._expire, member)

    # ---- for faults -------------------------------------------------------------------------------------------------

    def trusts(self, worker_id: WorkerId) -> bool:
        return self.coordinator is not None and worker_id in self.coordinator.view

    def wake(self, place: Place) -> None:
        """At once, unless it is in the middle of a step."""
        if place.process is not None and not place.process.stepping:
            self._wake_at(place, self.now_s)

    def go_on(self, place: Place) -> None:
        """A stopped process goes on in the middle of what it did; the step that ran is over by now."""
        place.stopped = False
        self._wake_at(place, self.now_s)

    def restart_member(self, member: CacheMember) -> None:
        member.restart()
        for worker_id in self._reaped:
            member.index.reaped(worker_id)
        member.settle()

    def kill_gateway(self) -> None:
        self.coordinator = None
        self.seen["waited at the door"] += self.admission.num_waited
        self.admission = self._new_admission()
        self.network.forget_sessions()
        self._gateway_died_s = self.now_s
        for request in self.checker.reset():
            self._ask_again(request)
