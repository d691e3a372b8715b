"""What goes wrong, and when it is over: each fault strikes a world at its time and heals later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tripool.messages import WorkerId
from tripool.simulate.member import SimMember
from tripool.simulate.place import Place, WorkerRun
from tripool.simulate.scenario import Fault
from tripool.simulate.world import World

_IN_COPY_CHANCE = 0.4


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        for fault in world.scenario.faults:
            world.clock.expect(fault.time_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        """Kinds that find nothing to strike just now (a worker that is restarting, say) still count as injected."""
        world = self._world
        world.faults[fault.kind] += 1
        world.clock.note(f"fault: {fault.kind}")
        place = world.rng.pick(list(world.places.values()))
        heal_s = world.now_s + fault.length_s
        match fault.kind:
            case "kill" if place.run is not None:
                self._now_or_in_copy(place.run, partial(world.end_later, place, 0.0, place.worker_id))
            case "stop" if place.run is not None:
                self._now_or_in_copy(place.run, partial(self._stop, place, place.run, fault.length_s))
            case "slow" if place.run is not None:
                place.run.slowness = world.rng.pick([5.0, 20.0])
                world.clock.expect(heal_s, self._hasten, place, place.worker_id)
            case "cut" | "loss" if world.network.is_up(place.name) and world.coordinator is not None:
                noticed = fault.kind == "cut"
                world.network.break_link(place.name, keeps=False)
                length_s = fault.length_s if noticed else fault.length_s / 20
                world.clock.expect(world.now_s + length_s, self._mend, place, noticed)
            case "spoil":
                for other in world.places.values():
                    if other.run is not None and other.run.slots is not None:
                        other.run.slots.num_to_spoil += 1
            case "cache restart":
                member = world.rng.pick(world.members)
                strike = partial(self._kill_member, member, fault.length_s)
                if member.disk is not None and world.rng.chance(_IN_COPY_CHANCE):
                    member.disk.in_read = strike
                else:
                    strike()
            case "purge":
                namespace = world.rng.pick(["", "other"])
                for member in world.members:
                    if member.up:
                        member.purge(namespace)
            case "disk full":
                world.rng.pick(world.members).fill_disk()
            case "disk rot":
                world.rng.pick(world.members).rot(world.rng.between(0, 2))
            case "gateway restart" if world.coordinator is not None:
                self._kill_gateway(fault.length_s)
            case "drain" if world.coordinator is not None and world.has_other(place):
                world.do(world.coordinator.drain(place.worker_id, world.now_s))

    def _now_or_in_copy(self, run: WorkerRun, strike: Callable[[], None]) -> None:
        """Copies are short, and the worst places to stop or die in: some faults wait for one."""
        if self._world.rng.chance(_IN_COPY_CHANCE):
            copies = ["transfer", "write"] if run.slots is None else ["read", "read", "write"]
            run.process.in_copy[self._world.rng.pick(copies)] = strike
        else:
            strike()

    def _stop(self, place: Place, run: WorkerRun, length_s: float) -> None:
        world = self._world
        if not run.process.stopped:
            run.process.stop()
            world.clock.expect(world.now_s + length_s, self._continue, place, run.worker_id)

    def _continue(self, place: Place, worker_id: WorkerId) -> None:
        """A stopped process goes on with what it knew."""
        world, run = self._world, place.run
        if place.worker_id == worker_id and run is not None:
            world.seen["woke up trusted" if world.trusts(worker_id) else "woke up untrusted"] += 1
            world.seen["woke up in a write"] += run.process.doing == "write"
            world.seen["woke up in a read"] += run.process.doing in ("read", "transfer")
            run.process.go_on()

    def _hasten(self, place: Place, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and place.run is not None:
            place.run.slowness = 1.0

    def _mend(self, place: Place, noticed: bool) -> None:
        if self._world.coordinator is not None:  # else the next gateway does
            self._world.network.mend_link(place.name)
            if noticed:
                self._world.network.disconnect(place.name)

    def _kill_member(self, member: SimMember, length_s: float) -> None:
        if member.up:
            member.kill()
            self._world.clock.expect(self._world.now_s + length_s, self._world.restart_member, member)

    def _kill_gateway(self, length_s: float) -> None:
        world = self._world
        world.kill_gateway()
        for place in world.places.values():
            world.network.break_link(place.name, keeps=world.rng.chance(0.5))
            if world.rng.chance(0.5):
                self._world.network.disconnect(place.name)
        world.clock.expect(world.now_s + length_s * world.rng.pick([0.2, 1.0, 5.0]), world.start_gateway)
