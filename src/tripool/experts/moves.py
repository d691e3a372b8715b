"""Moves from one expert map to another: in each step at most one expert per layer is copied, and the map's epoch rises.

A step's copies run while the map before it is in force, into slots that this map calls free; then the step's map takes
effect. A slot that a map no longer names may be overwritten once all ranks use that map.

Every rank may hold one expert more than the greater of its old and its new number. Then each copy can be one that the
new map asks for. Proof: suppose that no rank that lacks an expert has room, nor a stale replica that may be dropped.
Each such rank holds more stale replicas than it lacks experts. Each of these replicas is its expert's last, and some
rank lacks that expert. So at least as many experts are lacking as there are stale replicas: a contradiction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tripool.errors import ExpertMapError
from tripool.experts.expert_map import ExpertMap
from tripool.experts.placement import EMPTY, Loads, Table, expert_ranks, put, rank_loads

MIN_GAIN = 0.02
"""Of a mean rank's load: a layer stays as it is if neither its busiest rank nor all heavy ranks together gain that."""
_LEVEL = 1.02
"""Times the mean: what a rank has above it is excess."""


@dataclass(frozen=True)
class Copy:
    """One expert's weights to a slot of a rank, from a rank that holds it."""

    layer: int
    expert: int
    source: int
    rank: int
    slot: int


@dataclass(frozen=True)
class MoveStep:
    copies: tuple[Copy, ...]
    after: ExpertMap
    """In force once the copies are done."""


def plan_moves(
    old: ExpertMap, new: ExpertMap, budget: int, *, loads: npt.ArrayLike | None = None, min_gain: float = MIN_GAIN
) -> tuple[MoveStep, ...]:
    """Steps from the old map to the placement of the new one, with at most `budget` copies each.

    With loads, layers that gain less than `min_gain` keep their placement, and those that gain most come first. Slots
    of the last map may be numbered otherwise than those of the new one; ranks hold the same experts.
    """
    if (old.layers, old.ranks, old.experts, old.gone) != (new.layers, new.ranks, new.experts, new.gone):
        raise ExpertMapError("moves are possible only between maps of the same layers, ranks and experts")
    assert budget > 0
    gain = np.full(old.layers, np.inf)
    if loads is not None:
        mean = np.asarray(loads, np.float64).sum(axis=1) / int(expert_ranks(new.table).sum())
        before, after = (rank_loads(each.table, loads) / np.maximum(mean, 1e-300)[:, None] for each in (old, new))
        gain = np.maximum(_excess(before) - _excess(after), before.max(axis=1) - after.max(axis=1))
    order = [layer for layer in np.argsort(-gain, kind="stable").tolist() if gain[layer] >= min_gain]
    weights = np.ones((old.layers, old.experts)) if loads is None else np.asarray(loads, np.float64)
    shares = weights / new.counts
    moving = {layer: _LayerMoves(old.table[layer], new.table[layer], shares[layer]) for layer in order}
    table, last, steps = old.table.copy(), old, list[MoveStep]()
    while moving := {layer: moves for layer, moves in moving.items() if moves.lacking or moves.stale}:
        copies = []
        for layer, moves in list(moving.items())[:budget]:
            if (copied := moves.copy()) is not None:
                rank, expert = copied
                table = put(table, np.array([layer]), np.array([rank]), np.array([expert]))
                slot = int((table[layer, rank] == expert).argmax())
                sources = last.replicas(layer, expert)
                copies.append(Copy(layer, expert, sources[rank % len(sources)][0], rank, slot))
            for rank, expert in moves.drop():
                table[layer, rank][table[layer, rank] == expert] = EMPTY
        last = last.replaced(table)
        steps.append(MoveStep(tuple(copies), last))
    return tuple(steps)


def _excess(ranks: Loads) -> Loads:
    """(layers,): what heavy ranks have above the mean, in mean ranks (layers, ranks). Unlike the maximum, it falls with
    every move that relieves one of several heavy ranks. It may stay as it is while the maximum falls: with one slot per
    rank, what a replica takes off the busiest rank is added to the rank that makes room for it."""
    return np.asarray(np.maximum(ranks - _LEVEL, 0.0).sum(axis=1))


class _LayerMoves:
    """What is left to do in one layer, as (rank, expert) pairs. What relieves heavy ranks most comes first: the maps on
    the way serve too."""

    def __init__(self, old: Table, new: Table, share: Loads) -> None:
        """`share`: of one replica of each expert."""
        have, want = _pairs(old), _pairs(new)
        self._share = share
        self._load = np.zeros(len(old))
        for rank, expert in have:
            self._load[rank] += share[expert]
        self.lacking = sorted(want - have)
        self.stale = sorted(have - want)
        self._counts = Counter(expert for _, expert in have)
        self._wanted = Counter(expert for _, expert in want)
        held, due = Counter(rank for rank, _ in have), Counter(rank for rank, _ in want)
        self._room = {rank: max(held[rank], due[rank]) + 1 - held[rank] for rank in held | due}

    def copy(self) -> tuple[int, int] | None:
        """The next (rank, expert) to copy; None when only stale replicas are left."""
        if not self.lacking:
            return None
        relieved = {expert: 0.0 for _, expert in self.lacking}
        for rank, expert in self.stale:
            if expert in relieved:
                relieved[expert] = max(relieved[expert], float(self._load[rank]))
        feasible = [pair for pair in self.lacking if self._room[pair[0]]]
        pair = max(feasible, key=lambda pair: (relieved[pair[1]] - self._load[pair[0]], pair))
        self.lacking.remove(pair)
        self._room[pair[0]] -= 1
        self._load[pair[0]] += self._share[pair[1]]
        self._counts[pair[1]] += 1
        return pair

    def drop(self) -> list[tuple[int, int]]:
        """Stale replicas beyond the number that the expert will have; others only where no copy could follow."""
        heaviest_first = sorted(self.stale, key=lambda pair: -self._load[pair[0]])
        dropped = [pair for pair in heaviest_first if self._dropped(pair, self._wanted[pair[1]])]
        ranks = {rank for rank, _ in self.lacking}
        if ranks and not any(self._room[rank] for rank in ranks):
            blocking = (pair for pair in self.stale if pair[0] in ranks and pair not in dropped)
            dropped.append(next(pair for pair in blocking if self._dropped(pair, 1)))
        self.stale = [pair for pair in self.stale if pair not in dropped]
        return dropped

    def _dropped(self, pair: tuple[int, int], least: int) -> bool:
        rank, expert = pair
        if self._counts[expert] <= least:
            return False
        self._counts[expert] -= 1
        self._room[rank] += 1
        self._load[rank] -= self._share[expert]
        return True


def _pairs(table: Table) -> set[tuple[int, int]]:
    ranks, slots = np.nonzero(table != EMPTY)
    return set(zip(ranks.tolist(), table[ranks, slots].tolist(), strict=True))
