"""What goes wrong, and when it is over: each fault strikes a world at its time and heals later. Pure."""

from __future__ import annotations

from tripool.messages import WorkerId
from tripool.simulate.pool import CacheMember
from tripool.simulate.scenario import Fault
from tripool.simulate.world import Place, World


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        for fault in world.scenario.faults:
            world.clock.expect(fault.time_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        """Kinds that find nothing to strike just now (a worker between two lives, say) still count as injected."""
        world = self._world
        world.faults[fault.kind] += 1
        world.clock.note(f"fault: {fault.kind}")
        place = world.rng.pick(list(world.places.values()))
        heal_s = world.now_s + fault.length_s
        match fault.kind:
            case "kill":
                world.end_later(place, 0.0, place.worker_id)
            case "stop" if place.process is not None and not place.stopped:
                place.stopped = True
                world.clock.expect(heal_s, self._continue, place, place.worker_id)
            case "slow" if place.process is not None:
                place.process.slowness = world.rng.pick([5.0, 20.0])
                world.clock.expect(heal_s, self._hasten, place, place.worker_id)
            case "cut" | "loss" if world.network.is_up(place.name) and world.coordinator is not None:
                noticed = fault.kind == "cut"
                world.network.break_link(place.name, keeps=False)
                length_s = fault.length_s if noticed else fault.length_s / 20
                world.clock.expect(world.now_s + length_s, self._mend, place, noticed)
            case "spoil":
                for other in world.places.values():
                    if other.process is not None and other.spec.role == "prefill":
                        other.process.sender.num_to_spoil += 1
            case "cache restart":
                member = world.rng.pick(world.members)
                if member.up:
                    member.fall()
                    world.clock.expect(heal_s, self._restart, member)
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
            case "drain" if world.coordinator is not None:
                world.do(world.coordinator.drain(place.worker_id, world.now_s))

    def _continue(self, place: Place, worker_id: WorkerId) -> None:
        """Whoever was stopped wakes up with what it knew."""
        world = self._world
        if place.worker_id == worker_id and place.process is not None:
            world.seen["woke up trusted" if world.trusts(worker_id) else "woke up untrusted"] += 1
            world.seen["woke up in a write"] += bool(place.process.pool.writes)
            world.go_on(place)

    def _hasten(self, place: Place, worker_id: WorkerId) -> None:
        if place.worker_id == worker_id and place.process is not None:
            place.process.slowness = 1.0

    def _mend(self, place: Place, noticed: bool) -> None:
        if self._world.coordinator is not None:  # else the next gateway does
            self._world.network.mend_link(place.name)
            if noticed:
                self._disconnect(place)

    def _restart(self, member: CacheMember) -> None:
        self._world.restart_member(member)

    def _kill_gateway(self, length_s: float) -> None:
        world = self._world
        world.kill_gateway()
        for place in world.places.values():
            world.network.break_link(place.name, keeps=world.rng.chance(0.5))
            if world.rng.chance(0.5):
                self._disconnect(place)
        world.clock.expect(world.now_s + length_s * world.rng.pick([0.2, 1.0, 5.0]), world.start_gateway)

    def _disconnect(self, place: Place) -> None:
        """The worker's end notices that its connection broke."""
        if place.process is not None:
            place.process.disconnected = True
            self._world.wake(place)
