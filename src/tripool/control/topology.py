"""Topology as data: machines with their NUMA nodes, CPUs, memory, GPUs and network links, and the hosts of a server."""

from __future__ import annotations

from dataclasses import dataclass

_UNKNOWN_MBIT = 1000
"""Of a link whose speed the system does not tell, such as a virtual one."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """CPUs and the memory that is next to them."""

    number: int
    cpus: tuple[int, ...]
    """Those that this server may use."""
    memory_bytes: int = 0
    gpus: tuple[str, ...] = ()
    """PCI addresses."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface that is up."""

    name: str
    mbit: int = 0
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class Machine:
    nodes: tuple[NumaNode, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def mbit(self) -> int:
        """Of its fastest link."""
        return max((link.mbit or _UNKNOWN_MBIT for link in self.links), default=_UNKNOWN_MBIT)


@dataclass(frozen=True, slots=True)
class Site:
    """A host of a server."""

    name: str
    machine: Machine


@dataclass(frozen=True, slots=True)
class Topology:
    sites: tuple[Site, ...]

    def site(self, name: str) -> Site | None:
        return next((site for site in self.sites if site.name == name), None)


def mbit_between(one: Site, other: Site) -> float:
    """Infinite within a host."""
    return float("inf") if one.name == other.name else min(one.machine.mbit, other.machine.mbit)
