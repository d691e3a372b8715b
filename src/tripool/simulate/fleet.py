"""Serving workers and cache members in virtual time, on simulated processes, and a supervisor of a few rules.

The simulation hands in clock, transport, memory and engine. Everything else is the code that serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from tripool.cache.client import PoolClient
from tripool.config import CacheConfig, DiskConfig
from tripool.control.worker import Worker
from tripool.engine.fake import FakeTokens
from tripool.engine.fake_paged import PagedFake
from tripool.fabric import KvSender
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Hello,
    Left,
    Reaped,
    Refused,
    Tokens,
    ToWorker,
    TransferReady,
    WorkerId,
)
from tripool.router import Coordinator, Emit
from tripool.router.admission_types import Capacity
from tripool.simulate.checker import Checker
from tripool.simulate.disk import SimDisk
from tripool.simulate.hosts import GATEWAY_HOST
from tripool.simulate.member import LEASE_S, WRITE_S, SimHost, SimMember
from tripool.simulate.memory import Memory, SimTransfer
from tripool.simulate.network import Network, SimTransport
from tripool.simulate.process import Baton
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import BLOCK_TOKENS, HostFaultKind, Scenario, WorkerSpec, member_names
from tripool.simulate.timeline import Timeline
from tripool.simulate.world import World
from tripool.text.files import TextFiles

MODEL = "fake"


class ServingFleet:
    """`step`: runs the next event, and says whether the run goes on."""

    world: World[Coordinator]

    def __init__(
        self, scenario: Scenario, timeline: Timeline, rng: Rng, network: Network, checker: Checker, text: TextFiles,
        tokens: FakeTokens, step: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.timeline, self.text, self.tokens = timeline, text, tokens
        self._scenario, self._rng, self._checker = scenario, rng, checker
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        """That have struck so far, by kind."""
        self.memory = Memory()
        self.places = {name: Place(name, spec) for name, spec in scenario.workers.items()}
        self.network, self.hosts = network, network.hosts
        network.ends[0].to_gateway, network.ends[0].knows = self._reach_gateway, self.trusts
        self.members = [self._new_member(name) for name in member_names(scenario.num_members)]
        self.baton = Baton(timeline, rng, step)
        self._reaped: list[WorkerId] = []
        self._left_senders: set[str] = set()

    def _new_member(self, name: str) -> SimMember:
        spec = self._scenario.disk
        config = CacheConfig(
            slot_bytes=8 * BLOCK_TOKENS, num_slots=self._scenario.member_slots, lease_s=LEASE_S, write_s=WRITE_S,
            disk=DiskConfig(folder="", num_bytes=1) if spec is not None else None,
        )  # fmt: skip
        disk = SimDisk(spec, 8 * BLOCK_TOKENS) if spec is not None else None
        return SimMember(self.timeline, self._rng, self.memory, name, config, disk)

    def holders(self) -> Iterator[str]:
        """Who still holds or does something."""
        yield from (p.name for p in self.places.values() if p.run is None or not p.run.holds_nothing)
        alive = {run.worker_id for run in self.runs()}
        yield from (member.name for member in self.members if not member.holds_nothing(alive))

    def runs(self) -> list[WorkerRun]:
        return [place.run for place in self.places.values() if place.run is not None]

    def check(self) -> None:
        for run in self.runs():
            run.check()
        for member in self.members:
            if member.up:
                member.check()

    def count(self) -> Counter[str]:
        """What the faults made happen, at the end."""
        for run in self.runs():
            run.count(self.seen)
        for member in self.members:
            member.remember()
        seen = self.seen + self.network.seen + self.memory.seen + self.hosts.seen
        return sum((member.seen for member in self.members), seen)

    # ---- the gateway and the network --------------------------------------------------------------------------------

    def new_router(self, gateway_epoch: int) -> Coordinator:
        return Coordinator(self._scenario.router, epoch=gateway_epoch)

    def capacity(self, router: Coordinator) -> Capacity:
        view, slots = router.view, 0
        if self._scenario.minds_slots:
            slots = sum(m.hello.max_running for m in view if m.hello.role == "decode" and not m.draining)
        return Capacity(max(1, view.num_ready("prefill")), slots or None)

    def start(self, world: World[Coordinator]) -> None:
        self.world = world
        for place in self.places.values():
            self._start(place)

    def send(self, worker_id: WorkerId, message: ToWorker) -> None:
        self._checker.sent_to_worker(worker_id, message)
        self.network.send_to_worker(worker_id, message)

    def trusts(self, worker_id: WorkerId) -> bool:
        return self.world.router is not None and worker_id in self.world.router.view

    def _reach_gateway(self, worker_id: WorkerId, message: AnyMessage) -> None:
        coordinator = self.world.router
        if coordinator is None:
            return
        self.timeline.note(f"{type(message).__name__} from {worker_id}")
        match message:
            case Tokens():
                self.seen["tokens of an untrusted worker"] += worker_id not in coordinator.view
                self._checker.sent(message)
            case TransferReady():
                self._checker.offered(message)
            case Refused():
                self.seen[f"refused: {message.code}"] += 1
                if message.code == "bad_kv":
                    self._check_lost_transfer(message, coordinator)
            case Left():
                assert not coordinator.ledger.leases_at(worker_id), f"{worker_id} leaves with KV that is leased"
        outputs = coordinator.receive(message, self.timeline.now_s)
        if isinstance(message, Tokens):
            brought = {(s.event.request_id, s.event.choice, s.event.index): s.attempt for s in message.events}
            for output in outputs:
                if isinstance(output, Emit):
                    event = output.event
                    if event.stages is not None:
                        self.seen["blocks fetched from the cache"] += event.stages.fetched_tokens // BLOCK_TOKENS
                        self.seen["blocks fetched from disk"] += event.stages.disk_tokens // BLOCK_TOKENS
                    attempt = brought[event.request_id, event.choice, event.index]
                    self._checker.source(event, worker_id, attempt)
        self.world.do(outputs)

    def _check_lost_transfer(self, message: Refused, coordinator: Coordinator) -> None:
        """A sender that runs and has had no fault keeps what it has leased as it was."""
        leased = self._checker.leased(message.request_id, message.attempt)
        sender = f"{leased.worker_id}.kv" if leased is not None else ""
        if sender in self.memory.slots or sender in self._left_senders:
            excuses = self.faults.keys() & {"spoil", "cut", "loss", "gateway restart", "coordinator restart"}
            if leased is not None and self.hosts.of(leased.worker_id.name) != self.hosts.of(message.worker_id.name):
                excuses |= self.faults.keys() & get_args(HostFaultKind)
            known = message.worker_id in coordinator.view
            assert excuses or not known, f"{message.request_id}: KV of {sender} was lost under its lease"

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self, place: Place) -> None:
        host = self.hosts.of(place.name)
        self.hosts.carry(host, host, self._start_now, place)

    def _start_now(self, place: Place) -> None:
        place.epoch += 1
        place.ending = False
        worker_id = place.worker_id
        place.run = WorkerRun(self, worker_id, place.spec, lambda: self._left(place, worker_id))
        self.timeline.note(f"{worker_id} starts")

    def _left(self, place: Place, worker_id: WorkerId) -> None:
        self.timeline.note(f"{worker_id} leaves")
        self.seen["left after a drain"] += 1
        self._left_senders.add(f"{worker_id}.kv")
        self._end(place, worker_id)

    def suspected(self, worker_id: WorkerId) -> None:
        self.timeline.note(f"{worker_id} is suspected")
        self.seen["suspected"] += 1
        self._checker.lost(worker_id)
        end = (self.end_later, self.places[worker_id.name], self._rng.uniform(0.0, 0.5), worker_id)
        self.hosts.carry(GATEWAY_HOST, self.hosts.of(worker_id.name), *end)

    def end_later(self, place: Place, delay_s: float, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and not place.ending:
            place.ending = True
            self.timeline.expect(self.timeline.now_s + delay_s, self._end, place, worker_id)

    def _end(self, place: Place, worker_id: WorkerId) -> None:
        """Killed, or gone by itself; the supervisor reaps it and starts the next run."""
        if place.worker_id != worker_id or place.run is None:
            return
        self._kill(place, place.run)
        if self._rng.chance(0.5):
            self.network.lose_sent(place.name)
        self.timeline.expect(self.timeline.now_s + self._rng.uniform(0.002, 0.05), self._reap, place, worker_id)

    def _kill(self, place: Place, run: WorkerRun) -> None:
        run.count(self.seen)
        run.kill()
        place.run, place.ending = None, True

    def stop_host(self, host: int) -> None:
        """With all its processes, its supervisor and what they had sent."""
        self.hosts.cut(self.hosts.around(host))
        for place in self.places.values():
            if self.hosts.of(place.name) == host and place.run is not None:
                self._kill(place, place.run)
                self.network.lose_sent(place.name)
                self._reap(place, place.worker_id)
        for member in self.members:
            if self.hosts.of(member.name) == host and member.up:
                member.kill()
                self.hosts.carry(host, host, self.restart_member, member)

    def _reap(self, place: Place, worker_id: WorkerId) -> None:
        host = self.hosts.of(place.name)
        self.hosts.carry(host, host, self._reap_now, place, worker_id)

    def _reported(self, worker_id: WorkerId) -> None:
        """The supervisor's message reaches the gateway."""
        self._checker.lost(worker_id)
        if self.world.router is not None:
            self.world.do(self.world.router.receive(Reaped(worker_id), self.timeline.now_s))

    def _reap_now(self, place: Place, worker_id: WorkerId) -> None:
        self.timeline.note(f"{worker_id} is reaped")
        self._reaped.append(worker_id)
        self.memory.slots.pop(f"{worker_id}.kv", None)
        self.hosts.carry(self.hosts.of(place.name), GATEWAY_HOST, self._reported, worker_id)
        for member in self.members:
            member.reaped(worker_id)
        self.timeline.expect(self.timeline.now_s + self._rng.uniform(0.05, 0.4), self._start, place)

    def restart_member(self, member: SimMember) -> None:
        host = self.hosts.of(member.name)
        self.hosts.carry(host, host, self._restart_member, member)

    def _restart_member(self, member: SimMember) -> None:
        if member.up:
            return  # for another fault
        member.start()
        for worker_id in self._reaped:
            member.reaped(worker_id)

    def has_other(self, place: Place) -> bool:
        """Whether its role has another worker. A drained one whose Release was lost keeps the lease to its deadline:
        requests cannot wait for so long."""
        return any(other is not place and other.spec.role == place.spec.role for other in self.places.values())


class WorkerRun:
    """One run of a worker process."""

    def __init__(self, fleet: ServingFleet, worker_id: WorkerId, spec: WorkerSpec, ended: Callable[[], None]) -> None:
        timeline, memory = fleet.timeline, fleet.memory
        self.worker_id, self.slowness = worker_id, 1.0
        self.process = fleet.baton.start(lambda process: self.worker.run(), ended)
        config, token_s = spec.config, spec.token_s
        self.engine = PagedFake(
            fleet.text, name=MODEL, context_tokens=spec.context_tokens, num_blocks=config.num_blocks,
            max_running=config.max_running, step_tokens=config.step_tokens, block_tokens=config.block_tokens,
            prefix_reuse=config.prefix_reuse, step_s=token_s, row_s=token_s, prompt_token_s=token_s,
            tokens=fleet.tokens, clock=timeline.clock, wait=self._compute,
        )  # fmt: skip
        self._timeline = timeline
        shape = {"block_tokens": self.engine.block_tokens, "block_bytes": self.engine.block_bytes}
        hosts, host = fleet.hosts, fleet.hosts.of(worker_id.name)
        kv_transfer = SimTransfer(memory, self.process, worker_id, hosts, num_slots=spec.sender_slots, **shape)
        members = [member for member in fleet.members if hosts.of(member.name) == host]
        self._host = SimHost(timeline, memory, worker_id, members, self.process)
        pool = PoolClient(self._host, [member.name for member in members], worker_id) if members else None
        kv_tokens = int(self.engine.num_blocks * self.engine.block_tokens * spec.overstated)
        limits = (kv_tokens, self.engine.max_running, self.engine.context_tokens, self.engine.vocab)
        hello = Hello(PROTOCOL, spec.role, worker_id, 1, MODEL, *limits)
        transport = SimTransport(fleet.network, timeline, worker_id, self.process)
        self.worker = Worker(self.engine, hello, transport, kv_transfer, pool, clock=timeline.clock)
        self.slots = kv_transfer.slots

    @property
    def blocks_held(self) -> int:
        return self.worker.role.heartbeat().blocks_held

    @property
    def holds_nothing(self) -> bool:
        role = self.worker.role
        return self.process.doing == "poll" and not (role.busy or role.moving or self.blocks_held)

    def count(self, seen: Counter[str]) -> None:
        seen["preempted"] += self.engine.scheduler.num_preemptions

    def check(self) -> None:
        """Between two iterations of the worker's loop and in its steps: elsewhere it is in the middle of a change."""
        if self.process.doing not in ("poll", "step"):
            return
        scheduler = self.engine.scheduler
        scheduler.check()
        if isinstance(self.worker.kv, KvSender):
            self.worker.kv.check()
        held = [*scheduler.holders(), *scheduler.prefill.waiting, *scheduler.arriving, *scheduler.detached]
        placed = self.worker.role.placed
        assert {seq.request.id for seq in held} == placed, "a worker and its engine disagree on what is there"

    def kill(self) -> None:
        self.process.kill()
        self._host.hang_up()

    def _compute(self, step_s: float) -> None:
        self.process.wait(self._timeline.now_s + step_s * self.slowness, "step")


@dataclass(slots=True, eq=False)
class Place:
    """Where a worker runs, one run after another."""

    name: str
    spec: WorkerSpec
    epoch: int = 0
    run: WorkerRun | None = None
    ending: bool = False
    """The supervisor has decided to end this run."""

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.name, self.epoch)
