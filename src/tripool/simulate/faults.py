"""Faults of a serving fleet: each strikes at its time and ends later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tripool.messages import WorkerId
from tripool.router import Coordinator
from tripool.simulate.fleet import Place, ServingFleet, WorkerRun
from tripool.simulate.hosts import GATEWAY_HOST, Path
from tripool.simulate.member import SimMember
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import Fault
from tripool.simulate.world import World

_IN_COPY_CHANCE = 0.4
_KEEPS_S = 1.5
"""Connections between hosts outlive a cut of this length."""


class Faults:
    _world: World[Coordinator]

    def __init__(self, fleet: ServingFleet, rng: Rng, faults: list[Fault]) -> None:
        self._fleet, self._rng, self._faults = fleet, rng, faults

    def start(self, world: World[Coordinator]) -> None:
        self._world = world
        for fault in self._faults:
            world.timeline.expect(fault.time_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        """Kinds that find nothing to strike just now (a worker that is restarting, say) still count as injected."""
        world, fleet, length_s = self._world, self._fleet, fault.length_s
        fleet.faults[fault.kind] += 1
        world.timeline.note(f"fault: {fault.kind}")
        place = self._rng.pick(list(fleet.places.values()))
        match fault.kind:
            case "kill" if place.run is not None:
                self._now_or_in_copy(place.run, partial(fleet.end_later, place, 0.0, place.worker_id))
            case "stop" if place.run is not None:
                self._now_or_in_copy(place.run, partial(self._stop, place, place.run, length_s))
            case "slow" if place.run is not None:
                place.run.slowness = self._rng.pick([5.0, 20.0])
                self._later(length_s, self._hasten, place, place.worker_id)
            case "cut" | "loss" if fleet.network.is_up(place.name) and world.router is not None:
                noticed = fault.kind == "cut"
                fleet.network.break_link(place.name, keeps=False)
                self._later(length_s if noticed else length_s / 20, self._mend, place, noticed)
            case "spoil":
                for other in fleet.places.values():
                    if other.run is not None and other.run.slots is not None:
                        other.run.slots.num_to_spoil += 1
            case "cache restart":
                member = self._rng.pick(fleet.members)
                strike = partial(self._kill_member, member, length_s)
                if member.disk is not None and self._rng.chance(_IN_COPY_CHANCE):
                    member.disk.in_read = strike
                else:
                    strike()
            case "purge":
                namespace = self._rng.pick(["", "other"])
                for member in fleet.members:
                    if member.up:
                        member.purge(namespace)
            case "disk full":
                self._rng.pick(fleet.members).fill_disk()
            case "disk rot":
                self._rng.pick(fleet.members).rot(self._rng.between(0, 2))
            case "gateway restart" if world.router is not None:
                self._kill_gateway(length_s)
            case "coordinator restart" if world.router is not None:
                self._replace_coordinator(length_s)
            case "drain" if world.router is not None and fleet.has_other(place):
                world.do(world.router.drain(place.worker_id, world.timeline.now_s))
            case "partition" | "one way" | "slow path" | "host kill":
                self._strike_hosts(fault)

    # ---- hosts ------------------------------------------------------------------------------------------------------

    def _strike_hosts(self, fault: Fault) -> None:
        hosts, count = self._fleet.hosts, self._fleet.hosts.num_hosts
        one = self._rng.between(0, count - 1)
        other = (one + self._rng.between(1, count - 1)) % count
        both = hosts.between(one, other)
        match fault.kind:
            case "partition" | "one way":
                paths = both if fault.kind == "partition" else both[:1]
                hosts.cut(paths)
                ends = fault.length_s > _KEEPS_S or self._rng.chance(0.2)
                self._later(fault.length_s, self._join, paths, ends)
            case "slow path":
                delay_s = self._rng.pick([0.02, 0.2])
                hosts.slow(both, delay_s)
                self._later(fault.length_s, hosts.hasten, both, delay_s)
            case "host kill":
                killed = max(one, other)  # not the gateway's
                self._fleet.stop_host(killed)
                self._later(fault.length_s, hosts.mend, hosts.around(killed))

    def _join(self, paths: list[Path], ends: bool) -> None:
        """`ends`: meanwhile both ends have closed the connections, and what was on its way is lost."""
        network, hosts = self._fleet.network, self._fleet.hosts
        far = {host for path in paths for host in path if GATEWAY_HOST in path} - {GATEWAY_HOST}
        names = [name for name in self._fleet.places if hosts.of(name) in far and network.is_up(name)]
        ending = names if ends and self._world.router is not None else []
        for name in ending:
            network.break_link(name, keeps=False)
        hosts.mend(paths)
        for name in ending:
            network.mend_link(name)
            network.disconnect(name)

    def _later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self._world.timeline.expect(self._world.timeline.now_s + delay_s, action, *args)

    def _now_or_in_copy(self, run: WorkerRun, strike: Callable[[], None]) -> None:
        """Copies are short, and the worst places to stop or die in: some faults wait for one."""
        if self._rng.chance(_IN_COPY_CHANCE):
            copies = ["transfer", "write"] if run.slots is None else ["read", "read", "write"]
            run.process.in_copy[self._rng.pick(copies)] = strike
        else:
            strike()

    def _stop(self, place: Place, run: WorkerRun, length_s: float) -> None:
        if not run.process.stopped:
            run.process.stop()
            self._later(length_s, self._continue, place, run.worker_id)

    def _continue(self, place: Place, worker_id: WorkerId) -> None:
        """A stopped process goes on with what it knew."""
        fleet, run = self._fleet, place.run
        if place.worker_id == worker_id and run is not None:
            fleet.seen["woke up trusted" if fleet.trusts(worker_id) else "woke up untrusted"] += 1
            fleet.seen["woke up in a write"] += run.process.doing == "write"
            fleet.seen["woke up in a read"] += run.process.doing in ("read", "transfer")
            run.process.go_on()

    def _hasten(self, place: Place, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and place.run is not None:
            place.run.slowness = 1.0

    def _mend(self, place: Place, noticed: bool) -> None:
        if self._world.router is not None:  # else the next gateway does
            self._fleet.network.mend_link(place.name)
            if noticed:
                self._fleet.network.disconnect(place.name)

    def _kill_member(self, member: SimMember, length_s: float) -> None:
        if member.up:
            member.kill()
            self._later(length_s, self._fleet.restart_member, member)

    def _kill_gateway(self, length_s: float) -> None:
        """With the coordinator."""
        self._world.kill_gateway()
        self._end_sessions(length_s, self._world.start_gateway)

    def _replace_coordinator(self, length_s: float) -> None:
        """A standby takes its place: as soon as it is dead, or once it has been silent for long and was killed."""
        self._world.kill_coordinator()
        self._end_sessions(length_s / 10, self._world.take_over)

    def _end_sessions(self, length_s: float, start: Callable[[], None]) -> None:
        """All connections of the coordinator break, whether workers notice or not, until the next one starts."""
        network, names = self._fleet.network, list(self._fleet.places)
        network.forget_sessions()
        for name in names:
            network.break_link(name, keeps=self._rng.chance(0.5))
            if self._rng.chance(0.5):
                network.disconnect(name)

        def restart() -> None:
            start()
            for name in names:
                network.mend_link(name)

        self._later(length_s * self._rng.pick([0.2, 1.0, 5.0]), restart)
