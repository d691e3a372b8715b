"""What goes wrong in a deployment, when and for how long; and how long those whom it struck had to wait. Pure.

| kind | target | what happens |
|---|---|---|
| chip | decode-0.3 | chip 3 is gone: its workers' answers go on elsewhere; the others stand still until it is masked |
| chip | prefill-2 | the instance is gone: a batch needs all its chips |
| node | decode-0.1 | all chips of node 1 and its supervisor: the gateway notices by silence |
| node | prefill-2 | the same, for an instance |
| link | prefill-2, decode-0.3 | nothing new gets onto its links |
| cache | cache-5 | a member is gone with what it held |
| slow | decode-0, prefill-2 | every step takes so many times as long: the slowest rank decides |
| hot | decode-0 | the most popular expert gets so many times its rows, until replicas have been moved to level that |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from re import fullmatch

from tripool.core import TokenEvent
from tripool.errors import InvalidRequest, TripoolError
from tripool.messages import WorkerId
from tripool.router import Coordinator
from tripool.simulate.supernode.fleet import ModelledFleet
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.step_times import NO_TROUBLE
from tripool.simulate.timeline import FAULT, to_fs
from tripool.simulate.world import Observer, World

KINDS = ("chip", "node", "link", "cache", "slow", "hot")
_FORM = r"(\w+):((?:decode|prefill|cache)-\d+)(?:\.(\d+))?@(\d+(?:\.\d+)?)s?\+(\d+(?:\.\d+)?)s?(?:[x*](\d+(?:\.\d+)?))?"
_HINT = "KIND:TARGET@START+LENGTH, such as chip:decode-0.3@120s+60s, cache:cache-5@60s+30s or slow:decode-0@60s+30sx2"
_MASK_S = 1.0
"""How long the other ranks of an instance wait for one that is gone."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    target: str
    part: int | None
    at_s: float
    length_s: float
    factor: float = 2.0

    def __str__(self) -> str:
        part = "" if self.part is None else f".{self.part}"
        times = f"x{self.factor:g}" if self.kind in ("slow", "hot") else ""
        return f"{self.kind}:{self.target}{part}@{self.at_s:g}s+{self.length_s:g}s{times}"


def parse_fault(text: str, layout: Layout) -> Fault:
    found = fullmatch(_FORM, text.strip())
    if found is None or found[1] not in KINDS:
        raise InvalidRequest(f"fault {text!r} is not understood", hint=_HINT, param="fault")
    part = None if found[3] is None else int(found[3])
    fault = Fault(found[1], found[2], part, float(found[4]), float(found[5]), float(found[6] or 2.0))
    problem = _problem(fault, layout)
    if problem:
        raise InvalidRequest(f"fault {text!r}: {problem}", hint=_HINT, param="fault")
    return fault


def _problem(fault: Fault, layout: Layout) -> str:
    role, _, number = fault.target.partition("-")
    counts = {
        "decode": layout.decode.instances, "prefill": layout.prefill.instances, "cache": layout.num_members,
    }  # fmt: skip
    if int(number) >= counts[role]:
        return f"there are {counts[role]} {role}"
    if (fault.kind == "cache") != (role == "cache") or (fault.kind == "hot" and role != "decode"):
        return f"a {fault.kind} fault does not strike {role}"
    if role == "decode" and fault.kind in ("chip", "node", "link") and fault.part is None and fault.kind != "link":
        return f"which {fault.kind} of it? {fault.target}.0 is the first"
    if role == "decode" and fault.part is not None:
        most = {"chip": layout.decode.chips, "node": ceil(layout.decode.chips / layout.node_chips)}
        if fault.part >= most.get(fault.kind, layout.decode.workers):
            return f"{fault.target} has fewer parts"
    return "" if fault.length_s > 0 and fault.factor > 0 else "length and factor are above 0"


@dataclass(slots=True)
class Struck:
    """What one fault did."""

    fault: Fault
    num_requests: int = 0
    """That had something on what was lost."""
    waited_s: list[float] = field(default_factory=list)
    """From the fault to the next token of each of them."""
    num_failed: int = 0


class Faults(Observer):
    _world: World[Coordinator]

    def __init__(self, fleet: ModelledFleet, faults: Sequence[Fault]) -> None:
        self._fleet, self._timeline = fleet, fleet.timeline
        self.struck = [Struck(fault) for fault in faults]
        self._watched: dict[str, list[Struck]] = {}

    def start(self, world: World[Coordinator]) -> None:
        self._world = world
        for number, struck in enumerate(self.struck):
            self._timeline.at(to_fs(struck.fault.at_s), FAULT, number, self._strike, number)

    def _strike(self, number: int) -> None:
        struck, fleet = self.struck[number], self._fleet
        fault = struck.fault
        role, _, place = fault.target.partition("-")
        index = int(place)
        heal_fs = self._timeline.now_fs + to_fs(fault.length_s)

        def later(action: Callable[..., None], *args: object) -> None:
            self._timeline.at(heal_fs, FAULT, number, action, *args)

        if fault.kind == "cache":
            member = fleet.pool.members[fault.target]
            member.up = False
            later(member.restart)
        elif fault.kind == "link":
            self._cut(fault, role, index, heal_fs)
        elif fault.kind in ("slow", "hot"):
            self._slow(number, role, index, heal_fs)
            later(self._hasten, role, index)
        elif role == "prefill":
            keeper = fleet.prefills[index]
            if keeper is not None:
                self._lose(struck, [keeper.worker_id], reported=fault.kind == "chip")
                keeper.kill()
                fleet.prefills[index] = None
                later(fleet.start_prefill, index)
        else:
            self._lose_ranks(struck, index)
            later(fleet.revive, index, self._ranks(fault))

    # ---- processes --------------------------------------------------------------------------------------------------

    def _ranks(self, fault: Fault) -> range:
        """Workers of the instance that have something on the chips that are gone."""
        pool = self._fleet.layout.decode
        first, count = fault.part or 0, 1
        if fault.kind == "node":
            count = self._fleet.layout.node_chips
            first *= count
        last = min(first + count, pool.chips)
        return range(first * pool.workers // pool.chips, ceil(last * pool.workers / pool.chips))

    def _lose_ranks(self, struck: Struck, index: int) -> None:
        instance, ranks = self._fleet.decodes[index], self._ranks(struck.fault)
        worker_ids = [rank.worker_id for number in ranks if (rank := instance.ranks[number]) is not None]
        self._lose(struck, worker_ids, reported=struck.fault.kind == "chip")
        instance.kill(list(ranks), _MASK_S)

    def _lose(self, struck: Struck, worker_ids: list[WorkerId], *, reported: bool) -> None:
        assert self._world.router is not None
        ledger = self._world.router.ledger
        touched: set[str] = set()
        for worker_id in worker_ids:
            touched.update(request_id for request_id, _ in ledger.placements_at(worker_id))
            touched.update(request_id for request_id, _ in ledger.leases_at(worker_id))
            self._fleet.ended(worker_id, reported=reported)
        # What was sent before the fault still arrives.
        soon_fs = self._timeline.now_fs + 2 * to_fs(self._fleet.layout.links.hop_s)
        self._timeline.at(soon_fs, FAULT, len(self.struck), self._watch, struck, sorted(touched))

    def _watch(self, struck: Struck, touched: list[str]) -> None:
        for request_id in touched:
            if request_id in self._world.open:
                struck.num_requests += 1
                self._watched.setdefault(request_id, []).append(struck)

    # ---- links and engines ------------------------------------------------------------------------------------------

    def _cut(self, fault: Fault, role: str, index: int, heal_fs: int) -> None:
        fleet = self._fleet
        if role == "prefill":
            keeper = fleet.prefills[index]
            if keeper is not None:
                keeper.cut(heal_fs)
            return
        workers = fleet.layout.decode.workers
        first = len(fleet.prefills) + index * workers
        for number in range(first, first + workers) if fault.part is None else (first + fault.part,):
            fleet.in_links[number].cut(heal_fs)

    def _slow(self, number: int, role: str, index: int, heal_fs: int) -> None:
        fault, fleet = self.struck[number].fault, self._fleet
        if role == "prefill":
            keeper = fleet.prefills[index]
            if keeper is not None:
                keeper.slowness = fault.factor
        elif fault.kind == "slow":
            fleet.decodes[index].set_trouble((fault.factor, fleet.decodes[index].trouble[1]))
        elif fleet.layout.experts is None:
            self._heat(index, fault.factor)
        else:
            heat = fleet.layout.experts.heat(fault.factor)
            self._heat(index, heat.at_once)
            # The step that shows the load, then one per copy; each takes about the time per token that was planned.
            level_fs = self._timeline.now_fs + to_fs((1 + heat.move_steps) * fleet.layout.tpot_s)
            if level_fs < heal_fs:
                self._timeline.at(level_fs, FAULT, number, self._heat, index, heat.balanced)

    def _heat(self, index: int, factor: float) -> None:
        instance = self._fleet.decodes[index]
        instance.set_trouble((instance.trouble[0], factor))

    def _hasten(self, role: str, index: int) -> None:
        keeper = self._fleet.prefills[index] if role == "prefill" else None
        if role == "decode":
            self._fleet.decodes[index].set_trouble(NO_TROUBLE)
        elif keeper is not None:
            keeper.slowness = 1.0

    # ---- who waited -------------------------------------------------------------------------------------------------

    def token(self, event: TokenEvent) -> None:
        for struck in self._watched.pop(event.request_id, ()):
            struck.waited_s.append(self._timeline.now_s - struck.fault.at_s)

    def failed(self, request_id: str, error: TripoolError) -> None:
        for struck in self._watched.pop(request_id, ()):
            struck.num_failed += 1

    refused = failed
