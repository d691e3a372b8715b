"""Expert imbalance: load of the busiest rank over the mean, with and without balancing.

Popularity of experts is log-normal, taken at its quantiles. Balancing gives replicas to the most loaded experts and
packs them greedily, as the published balancers do. The rest is drift: a step's choices differ from the statistics
behind the placement, independently per expert, and few tokens scatter more than many. A step waits for its busiest
rank: the median of the maximum over ranks.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from math import erfc, exp, sqrt
from statistics import NormalDist

from tripool.planner.cost.setup import Balance

_STRIDE = 97  # coprime to usual numbers of experts: without balancing, popular experts are anywhere
_GRID = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_ROUNDS = 18
_QUANTILES = 16
_MEDIAN = 0.6931  # expected number of ranks above the median of the maximum: -ln(1/2)


def hottest(
    experts: int, slots: int, ranks: int, tokens: float, *, popularity: float, drift: float, balance: Balance
) -> float:
    """Busiest rank over mean rank, if a mean rank gets `tokens`. Perfect balance is of the mean alone: tokens still
    choose at random, and few of them scatter.
    """
    if ranks == 1:
        return 1.0
    scatter = min(1.0 / sqrt(max(tokens, 1e-9)), _GRID[-1])
    values = _on_grid(experts, slots, ranks, popularity, drift, balance)
    for left, right, low, high in zip(_GRID, _GRID[1:], values, values[1:], strict=False):
        if scatter <= right:
            return low + (high - low) * (scatter - left) / (right - left)
    return values[-1]


@lru_cache(maxsize=256)
def _on_grid(
    experts: int, slots: int, ranks: int, popularity: float, drift: float, balance: Balance
) -> tuple[float, ...]:
    loads = [(1.0, 0.0, ranks)] if balance == "perfect" else _rank_loads(experts, slots, ranks, popularity, balance)
    return tuple(_median_of_maximum(loads, drift, scatter) for scatter in _GRID)


def _rank_loads(
    experts: int, slots: int, ranks: int, popularity: float, balance: Balance
) -> list[tuple[float, float, int]]:
    """Per kind of rank: load over mean, root of the summed squares of its experts over mean, number of such ranks."""
    normal = NormalDist()
    chosen = [exp(popularity * normal.inv_cdf((index + 0.5) / experts)) for index in range(experts)]
    per_rank = slots // ranks
    held = _packed(chosen, slots, ranks) if balance == "balanced" else _as_they_come(chosen, per_rank, ranks)
    mean = sum(chosen) / ranks
    kinds: dict[tuple[float, float], int] = {}
    for loads in held:
        kind = (round(sum(loads) / mean, 6), round(sqrt(sum(load * load for load in loads)) / mean, 6))
        kinds[kind] = kinds.get(kind, 0) + 1
    return [(load, spread, count) for (load, spread), count in kinds.items()]


def _as_they_come(chosen: list[float], per_rank: int, ranks: int) -> list[list[float]]:
    order = [chosen[(index * _STRIDE) % len(chosen)] for index in range(len(chosen))]
    return [order[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]


def _packed(chosen: list[float], slots: int, ranks: int) -> list[list[float]]:
    """Give replicas to the expert with the highest load per replica, then pack greedily onto the least loaded rank."""
    heap = [(-load, load, 1) for load in chosen]
    heapq.heapify(heap)
    for _ in range(slots - len(chosen)):
        _, load, copies = heap[0]
        heapq.heapreplace(heap, (-load / (copies + 1), load, copies + 1))
    replicas = sorted((load / copies for _, load, copies in heap for _ in range(copies)), reverse=True)
    room = slots // ranks
    lightest = [(0.0, rank) for rank in range(ranks)]
    held: list[list[float]] = [[] for _ in range(ranks)]
    for load in replicas:
        total, rank = heapq.heappop(lightest)
        held[rank].append(load)
        if len(held[rank]) < room:
            heapq.heappush(lightest, (total + load, rank))
    return held


def share_chosen(copies: float, experts: int, spread: float) -> float:
    """Of `experts`, those that get any of so many token copies, if their popularity is log-normal with this spread."""
    mean = copies / experts
    return sum(1.0 - exp(-mean * weight) for weight in _weights(spread)) / _QUANTILES


@lru_cache(maxsize=16)
def _weights(spread: float) -> tuple[float, ...]:
    normal = NormalDist()
    found = [exp(spread * normal.inv_cdf((index + 0.5) / _QUANTILES)) for index in range(_QUANTILES)]
    return tuple(weight * _QUANTILES / sum(found) for weight in found)


@lru_cache(maxsize=256)
def deviations(ranks: int) -> float:
    """Median of the maximum of so many ranks, in standard deviations above the mean."""
    return NormalDist().inv_cdf(0.5 ** (1.0 / ranks)) if ranks > 1 else 0.0


def _median_of_maximum(kinds: list[tuple[float, float, int]], drift: float, scatter: float) -> float:
    spreads = [
        (load, max(1e-9, sqrt(2.0 * ((drift * spread) ** 2 + load * scatter * scatter))), count)
        for load, spread, count in kinds
    ]
    low = max(load for load, _, _ in kinds)
    low, high = min(1.0, low), low + 8.0 * max(spread for _, spread, _ in spreads)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        above = sum(count * 0.5 * erfc((middle - load) / spread) for load, spread, count in spreads)
        low, high = (middle, high) if above > _MEDIAN else (low, middle)
    return high
