"""Expert maps for tests: any placement, with and without replicas."""

from __future__ import annotations

import numpy as np

from tripool.experts import ExpertMap
from tripool.experts.layout import Layout
from tripool.experts.placement import EMPTY, Table

KINDS = ("in order", "dealt", "at random")


def table_of(kind: str, layout: Layout, *, replicas: bool, seed: int) -> Table:
    """[layers, ranks, slots]. At random some ranks may have none; every second expert has up to `ranks` replicas."""
    rng = np.random.default_rng(seed)
    held: list[list[set[int]]] = [[set() for _ in range(layout.ranks)] for _ in range(layout.layers)]
    for layer in range(layout.layers):
        for expert in range(layout.experts):
            rank = {
                "in order": expert * layout.ranks // layout.experts,
                "dealt": (expert + layer) % layout.ranks,
                "at random": int(rng.integers(layout.ranks)),
            }[kind]
            held[layer][rank].add(expert)
            if replicas and rng.random() < 0.5:
                for other in rng.choice(layout.ranks, int(rng.integers(1, layout.ranks + 1)), replace=False):
                    held[layer][other].add(expert)
    slots = max(len(experts) for ranks in held for experts in ranks)
    table = np.full((layout.layers, layout.ranks, slots), EMPTY, np.int32)
    for layer, ranks in enumerate(held):
        for rank, experts in enumerate(ranks):
            table[layer, rank, : len(experts)] = sorted(experts)
    return table


def map_of(kind: str, layout: Layout, *, replicas: bool, seed: int = 0, epoch: int = 1) -> ExpertMap:
    return ExpertMap(epoch, layout.experts, table_of(kind, layout, replicas=replicas, seed=seed))
