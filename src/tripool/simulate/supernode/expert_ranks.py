"""What an overloaded expert costs a decode instance, before and after the balancer has moved replicas. Pure.

The placement, the balancer and the moves are those that serve (`tripool.experts`), for one layer of sampled loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from tripool.experts import ExpertMap, balance, least_imbalance, plan_moves, rank_loads


@dataclass(frozen=True, slots=True)
class Heat:
    """How many times as long the experts' part of a step takes: at once, and after so many steps of moves."""

    at_once: float
    balanced: float
    move_steps: int
    best: float
    """What no placement in these slots goes below, however it is balanced."""


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks of one instance that hold routed experts."""

    experts: int
    ranks: int
    slots: int
    """Of one rank."""
    popularity: float
    """Spread of the experts' loads, log-normal, taken at its quantiles."""

    def heat(self, factor: float) -> Heat:
        """The most popular expert gets `factor` times its rows; the busiest rank decides."""
        quantiles = ((index + 0.5) / self.experts for index in range(self.experts))
        loads = [exp(self.popularity * NormalDist().inv_cdf(quantile)) for quantile in quantiles]
        heated = [*loads[:-1], factor * loads[-1]]
        heated = [load * sum(loads) / sum(heated) for load in heated]  # as many rows in all
        held = ExpertMap(0, self.experts, balance([loads], self.ranks, 1, self.slots))
        wanted = held.replaced(balance([heated], self.ranks, 1, self.slots, old=held.table))
        steps = plan_moves(held, wanted, 1, loads=[heated])
        settled = steps[-1].after if steps else held
        calm, at_once, balanced = (
            float(rank_loads(each.table, [given]).max())
            for each, given in ((held, loads), (held, heated), (settled, heated))
        )
        best = float(least_imbalance([heated], [self.slots] * self.ranks)[0]) * sum(loads) / self.ranks
        return Heat(at_once / calm, balanced / calm, len(steps), best / calm)
