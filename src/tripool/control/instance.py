"""The ranks of one instance as its supervisor sees them: which are there, and the expert map that follows from that.

The map lies in a file of the run folder, replaced as a whole. Ranks read it when a message says that it changed, and
from time to time; the gateway reads it for `tripool status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tripool.experts import ExpertMap, imbalance
from tripool.experts.balancer import Balancer
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Layout
from tripool.experts.placement import EMPTY, Counts
from tripool.experts.slabs import attach_slabs, create_slabs


def slabs_file(folder: Path, instance: str) -> Path:
    return folder / f"{instance}.slabs"


def map_file(folder: Path, instance: str) -> Path:
    return folder / f"{instance}.map"


class Instance:
    """Makes the shared memory of the exchange. Every change of the ranks is a new map with a higher epoch."""

    def __init__(
        self, name: str, folder: Path, layout: Layout, *, attention_only: Iterable[int] = (), hosts: int = 1
    ) -> None:
        """`attention_only`: ranks that hold no experts while others can. `hosts`: over which its ranks are spread."""
        create_slabs(slabs_file(folder, name), layout)
        self._view = SharedView(*attach_slabs(slabs_file(folder, name)))
        self.name, self._file = name, map_file(folder, name)
        shape = layout.layers, layout.experts, layout.ranks
        self._home = ExpertMap.contiguous(*shape, attention_only=attention_only)
        """The placement with all ranks."""
        self._balancer = Balancer(self._home, layout.top_k, hosts if layout.ranks % hosts == 0 else 1)
        self._present: set[int] = set()
        self._remote: dict[int, int] = {}
        self._entered: dict[int, int] = {}
        self._last = np.zeros((layout.ranks, layout.layers, layout.experts), np.int64)
        self._routed = np.zeros(self._last.shape[1:], np.int64)
        self.epoch = 0

    def enter(self, rank: int) -> bool:
        """A rank answers requests from now on. Whether the map changed."""
        changed = self._change(self._present | {rank})
        if changed:
            self._entered[rank] = self.epoch
        return changed

    def is_there(self, rank: int, map_epoch: int) -> bool:
        """Whether the rank that a map of this epoch named is still there: none has come in its place since."""
        return rank in self._present and map_epoch >= self._entered[rank]

    def leave(self, rank: int) -> bool:
        """A rank is gone, or given up: the others hold its experts."""
        return self._change(self._present - {rank})

    def remote(self, rank: int, process: int) -> bool:
        """What is known of a rank on another host: the number of its process, or 0: it is gone. A process that was
        given up never counts again: it may wait for answers to requests that were given up, too."""
        if process == 0:
            return self.leave(rank)
        if process == self._remote.get(rank):
            return False
        self._remote[rank] = process
        self.leave(rank)
        return self.enter(rank)

    def remote_ranks(self) -> list[int]:
        return [rank for rank in self._remote if rank in self._present]

    def outdated(self) -> list[int]:
        """Ranks of this host whose processes must end, since they were given up: none that this host decides about."""
        return []

    def balance(self) -> bool:
        """Take one step of moves if loads call for it. While a rank is missing, experts stay where they are."""
        if len(self._present) < self._home.ranks:
            return False
        moved = self._balancer.step(self._routed_so_far(), self._home)
        if moved is None:
            return False
        self._view.copies[0] = self._balancer.num_copies
        self._home = moved
        self._write(moved)
        return True

    def _routed_so_far(self) -> Counts:
        """[layers, experts]: rows of all ranks. The counts of a host that comes again begin at 0."""
        for rank in range(self._home.ranks):
            now, last = self._view.routed(rank).astype(np.int64), self._last[rank]
            self._routed += np.where(now >= last, now - last, now)
            self._last[rank] = now
        return self._routed.copy()

    def _change(self, present: set[int]) -> bool:
        if present == self._present:
            return False
        self._present = present
        self._balancer.reset()
        if not present:  # the next rank must not find a map that names ranks which are gone
            self.epoch += 1
            self._file.unlink()
            return True
        found = self._home
        for rank in set(range(found.ranks)) - present:
            found = found.without(rank)
        self._write(found)
        return True

    def _write(self, found: ExpertMap) -> None:
        self.epoch += 1
        write_map(self._file, replace(found, epoch=self.epoch).encode())


def write_map(file: Path, data: bytes) -> None:
    new = file.with_suffix(".next")
    new.write_bytes(data)
    new.replace(file)


def _routed(view: SharedView) -> Counts:
    """[layers, experts]: rows of all ranks."""
    return np.asarray(sum(view.routed(rank).astype(np.int64) for rank in range(view.layout.ranks)))


@dataclass(frozen=True, slots=True)
class RankStatus:
    present: bool
    experts: int
    """Replicas that it holds, of all layers."""
    rows: int
    """Rows of all ranks that were sent to its experts, since the start."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
    epoch: int
    """Of the expert map; 0: no rank is there."""
    ranks: tuple[RankStatus, ...]
    replicas: int
    """Most replicas of one expert."""
    imbalance: float
    """Rows of the busiest rank over the mean, in the worst layer: of all rows since the start, had they been sent under
    the present map, evenly over replicas."""
    copies: int
    """Replicas that were copied to follow the load, since the start."""


def read_instances(folder: Path) -> Iterator[InstanceStatus]:
    """All instances of several ranks in a run's folder."""
    for slabs in sorted(folder.glob(slabs_file(folder, "*").name)):
        layout, memory = attach_slabs(slabs)
        view = SharedView(layout, memory)
        loads = _routed(view)
        try:
            found = ExpertMap.decode(map_file(folder, slabs.stem).read_bytes())
        except FileNotFoundError:
            yield InstanceStatus(slabs.stem, 0, (RankStatus(False, 0, 0),) * layout.ranks, 0, 1.0, 0)
            continue
        rows = np.sum([view.assigned(layer) for layer in range(layout.layers)], axis=0)
        held = (found.table != EMPTY).sum(axis=(0, 2))
        ranks = (RankStatus(rank not in found.gone, int(held[rank]), int(rows[rank])) for rank in range(found.ranks))
        worst = float(imbalance(found.table, loads).max())
        yield InstanceStatus(slabs.stem, found.epoch, tuple(ranks), int(found.counts.max()), worst, int(view.copies[0]))
