"""The world of takeovers: who leads, who hears whom, clients and what they must see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tripool.core import FinishReason, Request, TokenEvent
from tripool.errors import TripoolError
from tripool.messages import Reaped, WorkerId
from tripool.router.kept_types import Count, keyed_request
from tripool.simulate.fleet import Place, ServingFleet
from tripool.simulate.network import Network
from tripool.simulate.rng import Rng
from tripool.simulate.takeover.coordinator import CoordinatorRun
from tripool.simulate.takeover.gateway import Client, SimGateway
from tripool.simulate.takeover.scenario import Ask, Fault, TakeoverScenario
from tripool.simulate.timeline import Timeline
from tripool.tenants import Caller, Tenant

SLOTS = 2
REFUSED = ("overloaded", "rate_limited", "ttft_unreachable")
_LATENCY_S = (0.0001, 0.002)


@dataclass(slots=True)
class Arbiter:
    """Who leads: the lock of a run's folder, and the epoch that is in it."""

    epoch: int = 0
    owner: CoordinatorRun | None = None

    def lead(self, run: CoordinatorRun) -> int:
        self.owner = run
        self.epoch += 1
        return self.epoch


class TakeoverFleet(ServingFleet):
    """Serving workers, whose messages go to the coordinator that listened when they connected."""

    takeovers: TakeoverWorld

    def begin(self, world: TakeoverWorld) -> None:
        self.takeovers = world
        for place in self.places.values():
            self._start(place)

    def trusts(self, worker_id: WorkerId) -> bool:
        run = self.takeovers.leader_of(worker_id.name)
        return run is not None and run.trusts(worker_id)

    def _reported(self, worker_id: WorkerId) -> None:
        for run in self.takeovers.living():
            if run.leads:
                run.do(run.from_worker, worker_id, Reaped(worker_id))

    def _start_now(self, place: Place) -> None:
        super()._start_now(place)
        run = place.run
        assert run is not None
        role, link, worker_id = run.worker.role, run.worker.link, place.worker_id
        receive = role.receive

        def watched(message: Any, now_s: float) -> None:
            leader = self.takeovers.leader_of(place.name)
            epoch = leader.epoch if leader is not None else 0
            assert epoch == link.epoch, f"{worker_id} obeys epoch {epoch}, and believes {link.epoch}"
            receive(message, now_s)

        role.receive = watched  # type: ignore[method-assign]


@dataclass(slots=True)
class TakeoverWorld:
    scenario: TakeoverScenario
    timeline: Timeline
    rng: Rng
    network: Network
    fleet: TakeoverFleet
    answer: Callable[[Request, int], tuple[list[int], FinishReason]]
    arbiter: Arbiter = field(default_factory=Arbiter)
    runs: list[CoordinatorRun | None] = field(default_factory=lambda: [None] * SLOTS)
    gateways: list[SimGateway] = field(default_factory=list)
    open: dict[str, Client] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    counts: dict[str, Count] = field(default_factory=dict)
    believed: Counter[WorkerId] = field(default_factory=Counter)
    """The highest epoch of a coordinator that each worker has believed."""
    num_tokens: int = 0
    _listening: CoordinatorRun | None = None
    _log_cuts: int = 0
    _num_gateways: int = 0
    _let_in: Counter[str] = field(default_factory=Counter)
    _excused: Counter[str] = field(default_factory=Counter)
    """Requests of each tenant that no log had told a successor of."""

    def begin(self) -> None:
        self.network.ends.append(type(self.network.ends[0])())
        for slot, end in enumerate(self.network.ends):
            end.to_gateway, end.knows = self._to_worker_end(slot), self._knows(slot)
        self.network.pick_end = self._pick_end
        for slot in range(SLOTS):
            self.runs[slot] = CoordinatorRun(self, slot)
        for _ in range(self.scenario.num_gateways):
            self._start_gateway()
        self.fleet.begin(self)
        for ask in self.scenario.asks:
            self.timeline.expect(ask.arrival.time_s, self._arrive, ask)
        for fault in self.scenario.faults:
            self.timeline.expect(fault.time_s, self._strike, fault)

    @property
    def now_s(self) -> float:
        return self.timeline.now_s

    def note(self, what: str) -> None:
        self.timeline.note(what)

    def living(self) -> list[CoordinatorRun]:
        return [run for run in self.runs if run is not None and not run.dead]

    # ---- coordinators -----------------------------------------------------------------------------------------------

    def succeeds(self, followed: CoordinatorRun | None) -> None:
        """Another one is about to lead, with the log of `followed`."""
        last = self._listening
        if last is None or followed is last:
            self._excused += last.untold if last is not None else Counter()
        else:
            self._excused = Counter(self._let_in)  # it knows nothing of what the last one let in

    def led(self, run: CoordinatorRun) -> None:
        self._listening = run
        self.seen["two living leaders"] += sum(one.leads for one in self.living()) > 1 or (
            run not in self.living() and any(one.leads for one in self.living())
        )

    def address(self) -> CoordinatorRun | None:
        """Whom a new connection reaches."""
        leading = [run for run in self.living() if run.leads]
        if self.scenario.stale and leading:
            return self.rng.pick(leading)
        listening = self._listening
        return listening if listening is not None and not listening.dead else None

    def _pick_end(self) -> int | None:
        run = self.address()
        return None if run is None else run.slot

    def leader_of(self, worker: str) -> CoordinatorRun | None:
        """To whom its channel leads."""
        end = self.network.end_of(worker)
        return None if end is None else self.runs[end]

    def _to_worker_end(self, slot: int) -> Callable[..., None]:
        def arrived(worker_id: WorkerId, message: Any) -> None:
            run = self.runs[slot]
            if run is not None:
                run.do(run.from_worker, worker_id, message)

        return arrived

    def _knows(self, slot: int) -> Callable[[WorkerId], bool]:
        def knows(worker_id: WorkerId) -> bool:
            run = self.runs[slot]
            return run is not None and run.trusts(worker_id)

        return knows

    def between_coordinators(self, to: CoordinatorRun, action: Callable[..., None], *args: Any) -> bool:
        """False: they do not reach each other."""
        if self._log_cuts or to.dead:
            return False
        self.timeline.call_at(self.now_s + self.rng.uniform(*_LATENCY_S), to.do, action, *args)
        return True

    def end_silent(self, leader: CoordinatorRun, by: CoordinatorRun) -> None:
        self.seen["silent leaders ended"] += 1
        if not self.scenario.kill_s:
            self.coordinator_died(leader)
            return
        self.arbiter.owner = None  # another arbiter has decided
        by.do(by._look)
        self.timeline.expect(self.now_s + self.scenario.kill_s, self.coordinator_died, leader)

    def coordinator_died(self, run: CoordinatorRun) -> None:
        if run.dead:
            return
        self.note(f"coordinator {run.slot} dies")
        run.dead = True
        if self.arbiter.owner is run:
            self.arbiter.owner = None
        for line in list(run.lines.values()):
            line.cut()
        for gateway in self.gateways:
            if gateway.line is not None and gateway.line.run is run:
                gateway.line.cut()
        self.network.end_closed(run.slot)
        self.timeline.expect(self.now_s + self.rng.uniform(0.1, 0.5), self._start_coordinator, run.slot)

    def _start_coordinator(self, slot: int) -> None:
        self.runs[slot] = CoordinatorRun(self, slot)

    def decided(self, run: CoordinatorRun) -> None:
        """A message leaves a leader."""
        leads = run.epoch == self.arbiter.epoch
        assert leads or self.scenario.blind, f"epoch {run.epoch} decides, though {self.arbiter.epoch} leads"
        self.seen["decisions of an old leader"] += not leads

    def let_in(self, tenant: Tenant) -> None:
        self._let_in[tenant.name] += 1
        if self.scenario.blind or self.scenario.stale:
            return
        per_minute = tenant.limits.requests_per_minute or float("inf")
        most = per_minute * (1 + self.now_s / 60) + self._excused[tenant.name]
        number = self._let_in[tenant.name]
        assert number <= most + 1e-6, f"'{tenant.name}' got {number} requests through, and may {most:.1f}"

    def count(self, count: Count) -> None:
        known = self.counts.setdefault(count.id, count)
        self.seen["counted again"] += known is not count

    # ---- gateways and clients ---------------------------------------------------------------------------------------

    def _start_gateway(self) -> None:
        self._num_gateways += 1
        self.gateways.append(SimGateway(self, self._num_gateways))

    def _arrive(self, ask: Ask, suffix: str = "") -> None:
        request = ask.arrival.request
        answers = [self.answer(request, choice) for choice in range(request.params.n)]
        caller = Caller(tenant=ask.arrival.tenant)
        keyed = keyed_request(caller, request.id, "sim", request.id.encode(), 0) if ask.keyed else None
        client = Client(request.id + suffix, ask.arrival, keyed, answers, [0] * len(answers))
        self.open[client.name] = client
        self._ask(client)
        if suffix:
            return
        if ask.arrival.cancel_s is not None:
            self.timeline.expect(self.now_s + ask.arrival.cancel_s, self._hang_up, client)
        if ask.twin_s is not None:
            self.timeline.expect(self.now_s + ask.twin_s, self._arrive, ask, "~")

    def _ask(self, client: Client) -> None:
        if not client.outcome:
            self.rng.pick(self.gateways).ask(client)

    def _hang_up(self, client: Client) -> None:
        if not client.outcome:
            for gateway in self.gateways:
                gateway.hang_up(client)
            self._end(client, "cancelled")

    def _end(self, client: Client, outcome: str) -> None:
        client.outcome = outcome
        self.outcomes[outcome] += 1
        del self.open[client.name]

    def token(self, client: Client, event: TokenEvent) -> None:
        request_id, choice = client.name, event.choice
        assert not client.outcome, f"{request_id}: a token after its end"
        tokens, finish = client.answers[choice]
        index = client.num_now[choice]
        assert event.index == index < len(tokens), f"{request_id}: token {index} was due: one is lost or comes twice"
        assert event.token_id == tokens[index], (
            f"{request_id} choice {choice}: {event.token_id} instead of {tokens[index]}"
        )
        last = index + 1 == len(tokens)
        assert event.finish_reason == (finish if last else None), f"{request_id}: finish {event.finish_reason}"
        client.num_now[choice] += 1
        if index == client.num_seen[choice]:
            client.num_seen[choice] += 1
            self.num_tokens += 1
        else:
            self.seen["tokens read again"] += 1
        if client.done and client.num_now == client.num_seen:
            self._end(client, "finished")

    def failed(self, client: Client, error: TripoolError) -> None:
        fine = error.code in REFUSED and self.scenario.base.may_refuse
        assert fine, f"{client.name}: failed although there was capacity: {error}"
        if not client.outcome:
            self._end(client, error.code)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self.note(f"fault: {fault.kind}")
        leader = self.arbiter.owner
        standby = next((run for run in self.living() if run is not leader and not run.leads), None)
        place = self.rng.pick(list(self.fleet.places.values()))
        match fault.kind:
            case "leader kill" if leader is not None:
                self.coordinator_died(leader)
            case "leader stop" if leader is not None:
                self._stop(leader, fault.length_s)
            case "standby kill" if standby is not None:
                self.coordinator_died(standby)
            case "standby stop" if standby is not None:
                self._stop(standby, fault.length_s)
            case "log cut":
                self._log_cuts += 1
                self.timeline.expect(self.now_s + fault.length_s, self._join_log)
            case "gateway kill":
                self._kill_gateway()
            case "line cut":
                line = self.rng.pick(self.gateways).line
                if line is not None:
                    line.cut()
            case "worker line cut":
                self.network.disconnect(place.name)
            case "worker kill" if place.run is not None:
                self.fleet.end_later(place, 0.0, place.worker_id)
            case "worker stop" if place.run is not None and not place.run.process.stopped:
                place.run.process.stop()
                self.timeline.expect(self.now_s + fault.length_s, self._wake_worker, place, place.worker_id)

    def _stop(self, run: CoordinatorRun, length_s: float) -> None:
        run.stop()
        self.timeline.expect(self.now_s + length_s, run.wake)

    def _join_log(self) -> None:
        self._log_cuts -= 1

    def _wake_worker(self, place: Place, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and place.run is not None:
            place.run.process.go_on()

    def _kill_gateway(self) -> None:
        gateway = self.gateways.pop(self.rng.between(0, len(self.gateways) - 1))
        self.note(f"gateway {gateway.number} dies")
        for client in gateway.kill():
            if client.outcome:
                continue
            if client.keyed is None:
                self._end(client, "gateway died")
            else:
                self.seen["repeated"] += 1
                self.timeline.expect(self.now_s + self.rng.uniform(0.02, 0.4), self._ask, client)
        self._start_gateway()

    # ---- the end ----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is to come, and nothing is held."""
        leader = self.arbiter.owner
        led = leader is not None and not leader.stopped and leader.holds_nothing
        return not self.open and not self.timeline.num_expected and led

    def check_workers(self) -> None:
        for worker in self.fleet.runs():
            epoch, before = worker.worker.link.epoch, self.believed[worker.worker_id]
            assert epoch is None or epoch >= before, f"{worker.worker_id} believes epoch {epoch} after {before}"
            self.believed[worker.worker_id] = epoch or before

    def check(self) -> None:
        for run in self.living():
            run.check()
        assert sum(run is self.arbiter.owner for run in self.living()) <= 1
        for count in self.counts.values():
            assert all(usage.completion_tokens >= 0 for usage in count.usages)
