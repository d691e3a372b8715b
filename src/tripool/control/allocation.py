"""Allocation: puts the ranks of instances on hosts and NUMA nodes, and says why. Pure.

The ranks of an instance are numbered host by host. They go where links are fastest: one NUMA node, else one host, else
the hosts with the fastest network between them. An instance that wants several hosts gets distinct ones, so replicas of
an expert have hosts to be spread over (`experts/balance.py`). Instances of one role go to different hosts as far as
there are any: a host that fails takes no pool with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tripool.control.topology import NumaNode, Site, Topology, mbit_between


@dataclass(frozen=True, slots=True)
class Want:
    """An instance that shall run."""

    name: str
    role: str
    ranks: int = 1
    cores: int = 1
    """Of each rank."""
    hosts: int = 1
    """Its ranks are spread over so many."""

    def shares(self) -> list[range]:
        """The ranks of each host: as equal as they can be, the first ones are larger."""
        hosts = max(1, min(self.hosts, self.ranks))
        least, more = divmod(self.ranks, hosts)
        begins = [number * least + min(number, more) for number in range(hosts + 1)]
        return [range(first, last) for first, last in pairwise(begins)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs."""

    want: str
    rank: int
    host: str
    node: int | None = None
    """The NUMA node that all its threads run on; None: no node has room for them, so any core of the host."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks for which there is no host."""

    want: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    places: tuple[Place, ...]
    missing: tuple[Missing, ...] = ()

    def at(self, host: str, want: str | None = None) -> list[Place]:
        return [place for place in self.places if place.host == host and want in (None, place.want)]


def allocate(wants: Sequence[Want], topology: Topology, held: Iterable[Place] = ()) -> Placement:
    """Place every want, in order. `held`: what runs already, and stays if its host is there; the rest is placed."""
    allocator = _Allocator(wants, topology, [place for place in held if topology.site(place.host) is not None])
    for want in wants:
        for share in want.shares():
            allocator.place(want, share)
    return Placement(tuple(allocator.places), tuple(allocator.missing))


class _Allocator:
    def __init__(self, wants: Sequence[Want], topology: Topology, held: Sequence[Place]) -> None:
        self._topology = topology
        self._wants = {want.name: want for want in wants}
        self._held = {(place.want, place.rank): place for place in held if place.want in self._wants}
        self.places: list[Place] = []
        self.missing: list[Missing] = []
        self._used: Counter[tuple[str, int | None]] = Counter()
        """Cores by host and node."""
        self._roles: Counter[tuple[str, str]] = Counter()
        """Ranks by host and role."""
        for place in self._held.values():
            self._count(self._wants[place.want], place)

    def place(self, want: Want, share: range) -> None:
        held = [self._held[want.name, rank] for rank in share if (want.name, rank) in self._held]
        self.places += held
        missing = [rank for rank in share if (want.name, rank) not in self._held]
        if not missing:
            return
        hosts = {place.host for place in held}
        site = self._topology.site(min(hosts)) if hosts else self._best(want, len(missing))
        if site is None:
            count = f"{len(want.shares())} hosts, and {len(self._topology.sites)} are there"
            self.missing.append(Missing(want.name, tuple(missing), f"{want.name} wants {count}"))
            return
        for rank, (node, reason) in zip(missing, self._nodes(want, site, len(missing)), strict=True):
            place = Place(want.name, rank, site.name, node, reason)
            self._count(want, place)
            self.places.append(place)

    def _count(self, want: Want, place: Place) -> None:
        self._used[place.host, place.node] += want.cores
        self._roles[place.host, want.role] += 1

    def _best(self, want: Want, ranks: int) -> Site | None:
        """The host for so many more ranks; none that has ranks of this instance already."""
        others = {place.host for place in (*self.places, *self._held.values()) if place.want == want.name}
        partners = [site for site in self._topology.sites if site.name in others]
        free, hosts = [site for site in self._topology.sites if site.name not in others], len(want.shares())

        def badness(site: Site) -> tuple[float, ...]:
            near = sorted((mbit_between(site, other) for other in partners or free if other is not site), reverse=True)
            link = min(near) if partners else near[min(hosts, len(near) + 1) - 2] if hosts > 1 and near else 0
            return (
                self._free(site) < ranks * want.cores,
                -link,
                self._roles[site.name, want.role],
                -self._free(site),
            )

        return min(free, key=badness, default=None)

    def _free(self, site: Site) -> int:
        used = sum(cores for (host, _), cores in self._used.items() if host == site.name)
        return len(site.machine.cpus) - used

    def _nodes(self, want: Want, site: Site, ranks: int) -> list[tuple[int | None, str]]:
        """A node for each of these ranks: one for all if there is such a node."""
        free = {node.number: len(node.cpus) - self._used[site.name, node.number] for node in site.machine.nodes}
        where = f"host {site.name}" + (f", {site.machine.mbit} Mbit/s" if len(want.shares()) > 1 else "")
        whole = [number for number, cores in free.items() if cores >= ranks * want.cores]
        if whole:
            number = min(whole, key=lambda one: (free[one], one))
            reason = f"{where}: node {number} has {free[number]} free cores for {ranks} x {want.cores}"
            return [(number, reason)] * ranks
        found: list[tuple[int | None, str]] = []
        for _ in range(ranks):
            number = max(free, key=lambda one: (free[one], -one), default=-1)
            if free.get(number, 0) < want.cores:
                found.append((None, f"{where}: no node has {want.cores} free cores left, so any core"))
                continue
            free[number] -= want.cores
            found.append((number, f"{where}: no node has room for {ranks} x {want.cores} cores; node {number} for one"))
        return found


def check(placement: Placement, wants: Sequence[Want], topology: Topology) -> None:
    """The invariants: every rank is placed or missing, once; each node has the cores that were given away; the shares
    of an instance are on distinct hosts; a host's ranks are consecutive."""
    expected = sorted((want.name, rank) for want in wants for rank in range(want.ranks))
    lacking = [(one.want, rank) for one in placement.missing for rank in one.ranks]
    assert sorted([(p.want, p.rank) for p in placement.places] + lacking) == expected, "a rank is lost, or there twice"
    used: Counter[tuple[str, int]] = Counter()
    by_name = {want.name: want for want in wants}
    for place in placement.places:
        site = topology.site(place.host)
        assert site is not None, "a rank on a host that is not there"
        if place.node is not None:
            used[place.host, place.node] += by_name[place.want].cores
    for (host, number), cores in used.items():
        assert cores <= len(_node(topology, host, number).cpus), "more cores were given away than a node has"
    for want in wants:
        hosts = [{place.host for place in placement.places if place.want == want.name and place.rank in share}
                 for share in want.shares()]  # fmt: skip
        assert all(len(found) <= 1 for found in hosts), "a share on two hosts"
        taken = [host for found in hosts for host in found]
        assert len(taken) == len(set(taken)), "two shares of an instance on one host"


def _node(topology: Topology, host: str, number: int) -> NumaNode:
    site = topology.site(host)
    assert site is not None
    return next(node for node in site.machine.nodes if node.number == number)


def cpus_of(place: Place, topology: Topology) -> tuple[int, ...]:
    """What its process is bound to; empty: not bound, since there is no choice, or no node has room."""
    site = topology.site(place.host)
    if site is None or place.node is None or len(site.machine.nodes) < 2:
        return ()
    return _node(topology, place.host, place.node).cpus
