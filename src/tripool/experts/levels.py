"""Replica choice at dispatch: rows of an expert with several replicas go where the fewest rows went lately.

A result does not depend on the replica, so this is only a matter of load. All sources of an instance add the rows that
they send to one count per layer and rank; a source sees what the others have sent, and levels the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tripool.experts.placement import EMPTY, Counts

SPLIT_ROWS = 16
"""Rows of an expert that stay together: a replica that has so many reads its weights for good reason."""
MEMORY_ROWS = 64
"""Per rank: what is remembered of the rows sent before. Longer, and a step pays for what steps long ago were given."""


class Levels:
    """What one source remembers of one layer."""

    def __init__(self, source: int, ranks: int) -> None:
        self._source = source
        self._forgotten = np.zeros(ranks, np.int64)

    def choose(self, rows: Sequence[int], table: npt.NDArray[np.int32], assigned: Counts) -> Counts:
        """(experts, most replicas): how many of each expert's rows go to each of its replicas.

        rows: of each expert. table: (experts, most replicas), the ranks with a replica, -1 after the last. assigned:
        rows that all sources have sent to each rank so far.
        """
        level = assigned - self._forgotten
        while int(level.sum()) > MEMORY_ROWS * len(level):
            level >>= 1
        self._forgotten = assigned - level
        taken = np.zeros(table.shape, np.int64)
        chosen = [(expert, count) for expert, count in enumerate(rows) if count]
        for several in (False, True):  # first what has no choice
            for expert, left in chosen:
                ranks = [rank for rank in table[expert].tolist() if rank != EMPTY]
                while (len(ranks) > 1) == several and left:
                    count = min(SPLIT_ROWS, left)
                    rank = min(ranks, key=lambda one: (level[one], (one - self._source) % len(level)))
                    taken[expert, ranks.index(rank)] += count
                    level[rank] += count
                    left -= count
        return taken
