"""A whole deployment in virtual time: the coordinator, workers and cache members that serve, and faults.

A heap of events, each at its time; the same seed gives the same events in the same order. After every event the cheap
invariants are checked, after every fifty the full ones, and at the end that nothing is held anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tripool.config import CacheConfig, DiskConfig
from tripool.core import Request
from tripool.engine.fake import FakeTokens, fake_text
from tripool.errors import TripoolError
from tripool.fabric.link import SILENCE_S
from tripool.messages import AnyMessage, Left, Reaped, Refused, Tokens, WorkerId
from tripool.router import Coordinator, Emit, Fail, Output, Send, ToSupervisor
from tripool.simulate.admission import SimAdmission
from tripool.simulate.checker import Checker
from tripool.simulate.clock import Clock
from tripool.simulate.disk import SimDisk
from tripool.simulate.member import LEASE_S, WRITE_S, SimMember
from tripool.simulate.memory import Memory, sender_of
from tripool.simulate.network import Network
from tripool.simulate.place import Place, Shared, WorkerRun
from tripool.simulate.process import Baton
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import BLOCK_TOKENS, Arrival, Scenario

_TICK_S = 0.05
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


class World:
    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.clock = Clock(trace)
        self.rng = Rng(scenario.seed + 2**32)
        text = fake_text()
        tokens = FakeTokens(text)
        self.checker = Checker(scenario.may_refuse, tokens.answer)
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_events = 0
        self.memory = Memory()
        self.places = {name: Place(name, spec) for name, spec in scenario.workers.items()}
        self.network = Network(self.clock, self.rng, list(self.places), self._reach_gateway, self.trusts)
        self.members = [self._new_member(f"cache-{n}") for n in range(scenario.num_members)]
        self.baton = Baton(self.clock, self.rng, self._step)
        self._shared = Shared(self.clock, self.baton, self.network, self.memory, self.members, text, tokens)
        self.coordinator: Coordinator | None = None
        self.admission = self._new_admission()
        self._reaped: list[WorkerId] = []
        self._left_senders: set[str] = set()
        self._gateway_epoch = 0
        self._gateway_died_s = 0.0

    def _new_member(self, name: str) -> SimMember:
        spec = self.scenario.disk
        config = CacheConfig(
            slot_bytes=8 * BLOCK_TOKENS,
            num_slots=self.scenario.member_slots,
            lease_s=LEASE_S,
            write_s=WRITE_S,
            disk=DiskConfig(folder="", num_bytes=1) if spec is not None else None,
        )
        disk = SimDisk(spec, 8 * BLOCK_TOKENS) if spec is not None else None
        return SimMember(self.clock, self.rng, self.memory, name, config, disk)

    # ---- time -------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        self.start_gateway()
        for place in self.places.values():
            self._start(place)
        for arrival in self.scenario.arrivals:
            self.clock.expect(arrival.time_s, self._arrive, arrival)
        self.baton.run()
        return self._report()

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def _step(self) -> bool:
        """The next event; False when all is over."""
        if self._is_over():
            return False
        self.clock.step()
        assert self.clock.now_s < _DEADLINE_S, f"hangs: {self.checker.open_ids}, {list(self._holders())}"
        self.num_events += 1
        if self.coordinator is not None:
            known = len(self.coordinator.ledger) + len(self.admission)
            assert known == self.checker.num_open, "the ledger and the clients disagree"
        if self.num_events % _FULL_CHECK_EVENTS == 0:
            self.check()
        return True

    def _is_over(self) -> bool:
        """Nothing is to come, every request has ended, and nothing is held."""
        if self.clock.num_pending or self.checker.num_open or self.coordinator is None:
            return False
        return next(self._holders(), None) is None

    def _holders(self) -> Iterator[str]:
        """Who still holds or does something."""
        yield from (p.name for p in self.places.values() if p.run is None or not p.run.holds_nothing)
        alive = {place.worker_id for place in self.places.values() if place.run is not None}
        yield from (member.name for member in self.members if not member.holds_nothing(alive))
        if not self.admission.admission.idle:
            yield "admission"

    def check(self) -> None:
        if self.coordinator is not None:
            self.coordinator.check(self.now_s - 2 * _TICK_S)
            self.admission.check(self.now_s)
        for place in self.places.values():
            if place.run is not None:
                place.run.check()
        for member in self.members:
            if member.up:
                member.check()
        if self.coordinator is None and self.now_s - self._gateway_died_s > _FREED_S:
            runs = [place.run for place in self.places.values() if place.run is not None]
            busy = [str(run.worker_id) for run in runs if not run.process.stopped and run.blocks_held]
            assert not busy, f"{busy} hold blocks {_FREED_S:g} s after the gateway's death"

    def _report(self) -> Report:
        self.check()
        assert self.coordinator is not None
        for place in self.places.values():
            assert place.run is not None
            place.run.count(self.seen)
        self.seen += self.network.seen
        self.seen += self.memory.seen
        for member in self.members:
            member.remember()
            self.seen += member.seen
        self.seen["dropped events of old attempts"] += self.coordinator.ledger.num_dropped
        self.seen["waited for admission"] += self.admission.num_waited
        return Report(
            self.scenario.seed, self.num_events, self.checker.num_requests, self.checker.num_tokens, self.now_s,
            self.clock.trace_hash, self.faults, self.checker.outcomes, self.seen,
        )  # fmt: skip

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
                self.seen["cancelled before admission"] += 1
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
        self.clock.note(f"{request.id} is admitted")
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
                    self.checker.sent_to_worker(output.worker_id, output.message)
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

    def _reach_gateway(self, worker_id: WorkerId, message: AnyMessage) -> None:
        if self.coordinator is None:
            return
        self.clock.note(f"{type(message).__name__} from {worker_id}")
        if isinstance(message, Tokens) and worker_id not in self.coordinator.view:
            self.seen["tokens of an untrusted worker"] += 1
        if isinstance(message, Refused):
            self.seen[f"refused: {message.code}"] += 1
            if message.code == "bad_kv":
                self._check_lost_transfer(message)
        if isinstance(message, Tokens):
            self.checker.sent(message)
        if isinstance(message, Left):
            assert not self.coordinator.ledger.leases_at(worker_id), f"{worker_id} leaves with KV that is leased"
        outputs = self.coordinator.receive(message, self.clock.now_s)
        if isinstance(message, Tokens):
            brought = {(s.event.request_id, s.event.choice, s.event.index): s.attempt for s in message.events}
            for output in outputs:
                if isinstance(output, Emit):
                    event = output.event
                    if event.stages is not None:
                        self.seen["blocks fetched from the cache"] += event.stages.fetched_tokens // BLOCK_TOKENS
                        self.seen["blocks fetched from disk"] += event.stages.disk_tokens // BLOCK_TOKENS
                    attempt = brought[event.request_id, event.choice, event.index]
                    self.checker.source(event, worker_id, attempt)
        self.do(outputs)

    def _check_lost_transfer(self, message: Refused) -> None:
        """A sender that is there and has heard of no fault keeps what it has leased as it was."""
        sender = sender_of(self.checker.descriptor(message.request_id, message.attempt))
        if sender in self.memory.slots or sender in self._left_senders:
            excuses = self.faults.keys() & {"spoil", "cut", "loss", "gateway restart"}
            known = self.coordinator is not None and message.worker_id in self.coordinator.view
            assert excuses or not known, f"{message.request_id}: KV of {sender} was lost under its lease"

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self, place: Place) -> None:
        place.epoch += 1
        place.ending = False
        worker_id = place.worker_id
        place.run = WorkerRun(self._shared, worker_id, place.spec, lambda: self._left(place, worker_id))
        self.clock.note(f"{worker_id} starts")

    def _left(self, place: Place, worker_id: WorkerId) -> None:
        self.clock.note(f"{worker_id} leaves")
        self.seen["left after a drain"] += 1
        self._left_senders.add(f"{worker_id}.kv")
        self._end(place, worker_id)

    def end_later(self, place: Place, delay_s: float, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and not place.ending:
            place.ending = True
            self.clock.expect(self.now_s + delay_s, self._end, place, worker_id)

    def _end(self, place: Place, worker_id: WorkerId) -> None:
        """Killed, or gone by itself; the supervisor reaps it and starts the next run."""
        if place.worker_id != worker_id or place.run is None:
            return
        place.run.count(self.seen)
        place.run.kill()
        place.run = None
        place.ending = True
        if self.rng.chance(0.5):
            self.network.lose_sent(place.name)
        self.clock.expect(self.now_s + self.rng.uniform(0.002, 0.05), self._reap, place, worker_id)

    def _reap(self, place: Place, worker_id: WorkerId) -> None:
        self.clock.note(f"{worker_id} is reaped")
        self._reaped.append(worker_id)
        self.checker.lost(worker_id)
        self.memory.slots.pop(f"{worker_id}.kv", None)
        if self.coordinator is not None:
            self.do(self.coordinator.receive(Reaped(worker_id), self.now_s))
        for member in self.members:
            member.reaped(worker_id)
        self.clock.expect(self.now_s + self.rng.uniform(0.05, 0.4), self._start, place)

    # ---- for faults -------------------------------------------------------------------------------------------------

    def trusts(self, worker_id: WorkerId) -> bool:
        return self.coordinator is not None and worker_id in self.coordinator.view

    def has_other(self, place: Place) -> bool:
        """Whether its role has another worker. A drained one whose Release was lost keeps the lease to its deadline:
        requests cannot wait for so long."""
        return any(other is not place and other.spec.role == place.spec.role for other in self.places.values())

    def restart_member(self, member: SimMember) -> None:
        member.start()
        for worker_id in self._reaped:
            member.reaped(worker_id)

    def kill_gateway(self) -> None:
        self.coordinator = None
        self.seen["waited for admission"] += self.admission.num_waited
        self.admission = self._new_admission()
        self.network.forget_sessions()
        self._gateway_died_s = self.now_s
        for request in self.checker.reset():
            self._ask_again(request)
