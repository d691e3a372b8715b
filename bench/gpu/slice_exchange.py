"""What one rank of a large deployment cannot measure: who sends it tokens, and what sending costs. Data and arithmetic.

Dispatch and combine come from published tables for 128 tokens per rank (see `SOURCES`), scaled by tokens. No published
row is smaller, and at few tokens latency counts, not bytes: below 128 the table's own value is told too, as a bound.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

TOKENS_PUBLISHED = 128
EXPERTS, TOP_K = 256, 8
SOURCES = {
    "deepep": "DeepEP on H800, later release: low-latency dispatch / combine, µs at 128 tokens per rank, EP 8 … 256",
    "cloudmatrix": "arXiv 2506.12708: FusedDispatch / FusedCombine on CloudMatrix384, µs at 128 tokens, EP 8 and 256",
}
TABLES: dict[str, dict[int, tuple[float, float]]] = {
    "deepep": {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)},
    "cloudmatrix": {8: (116, 118), 256: (152, 149)},
}


def exchange_us(table: str, ranks: int, tokens: int, *, least_tokens: int = 0) -> float:
    """Dispatch and combine of one layer. Between published sizes by their logarithm; beyond the largest, as there."""
    rows = sorted(TABLES[table].items())
    scale = max(least_tokens, tokens) / TOKENS_PUBLISHED
    for (low, below), (high, above) in pairwise(rows):
        if ranks <= high:
            share = max(0.0, math.log2(ranks / low) / math.log2(high / low))
            return scale * sum(a + (b - a) * share for a, b in zip(below, above, strict=True))
    return scale * sum(rows[-1][1])


@dataclass(frozen=True)
class Duty:
    """What this rank computes for others in one layer: rows per expert that lives here."""

    rows: tuple[int, ...]
    own_shared: bool
    """Whether the shared expert runs here, over this rank's own tokens; with EP320 other ranks have it."""

    @property
    def total(self) -> int:
        return sum(self.rows)


def duty(ranks: int, tokens: int, skew: float, rng: random.Random) -> Duty:
    """Drawn for the busiest rank: the others wait for it. `skew` 0: balanced; else popularity falls as rank^-skew.

    EP32 and EP128 hold 256 / ranks experts each, spread so that ranks are as equal as whole experts allow, and the
    shared one over own tokens; EP320 is 256 routed, a second copy of the 32 most popular, and 32 copies of the shared.
    """
    load = [(e + 1) ** -skew for e in range(EXPERTS)]
    chosen = [share * TOP_K / sum(load) for share in load]
    chosen = [min(1.0, share) for share in chosen]
    everybody = ranks * tokens
    if ranks > EXPERTS:
        copies = [share / 2 if i < ranks - EXPERTS - 32 else share for i, share in enumerate(chosen)]
        shared = everybody / 32
        return Duty((max(_drawn(everybody, max(copies), rng), round(shared)),), own_shared=False)
    held: list[list[float]] = [[] for _ in range(ranks)]
    for share in sorted(chosen, reverse=True):  # the largest first, each to who has least
        room = [one for one in held if len(one) < EXPERTS // ranks]
        min(room, key=sum).append(share)
    busiest = max(held, key=sum)
    return Duty(tuple(_drawn(everybody, share, rng) for share in busiest), own_shared=True)


def _drawn(trials: int, share: float, rng: random.Random) -> int:
    """Binomial, by its normal limit: trials are in the thousands."""
    spread = math.sqrt(trials * share * max(0.0, 1 - share))
    return max(1, min(trials, round(rng.gauss(trials * share, spread))))
