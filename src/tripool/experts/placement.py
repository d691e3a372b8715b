"""Placement tables: which expert lies in which slot, how often an expert is replicated, and what each rank computes.

A table is an integer array (layers, ranks, slots); `EMPTY` marks a free slot. The load of an expert is divided evenly
among its replicas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int32]
Loads = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

EMPTY = -1


def replica_counts(table: Table, experts: int) -> Counts:
    """(layers, experts): the number of replicas of each expert."""
    layers = len(table)
    flat = table.reshape(layers, -1)
    keys = (np.arange(layers)[:, None] * experts + flat)[flat != EMPTY]
    return np.bincount(keys, minlength=layers * experts).reshape(layers, experts)


def rank_loads(table: Table, loads: npt.ArrayLike) -> Loads:
    """(layers, ranks): the load of each rank, given the load of each expert (layers, experts)."""
    given = np.asarray(loads, np.float64)
    layers, experts = given.shape
    shares = np.zeros((layers, experts + 1))  # the last column is what EMPTY indexes
    np.divide(given, replica_counts(table, experts), out=shares[:, :experts], where=given > 0)
    return np.asarray(shares[np.arange(layers)[:, None, None], table].sum(axis=2))


def expert_ranks(table: Table) -> npt.NDArray[np.bool_]:
    """(ranks,): the ranks that hold any expert in any layer; the others serve attention only, or nothing."""
    return np.asarray((table != EMPTY).any(axis=(0, 2)))


def imbalance(table: Table, loads: npt.ArrayLike) -> Loads:
    """(layers,): load of the busiest rank over the mean of the ranks that hold experts; 1.0 is perfect balance."""
    mean = np.asarray(loads, np.float64).sum(axis=1) / max(1, int(expert_ranks(table).sum()))
    busiest = rank_loads(table, loads).max(axis=1)
    return np.asarray(np.divide(busiest, mean, out=np.ones(len(table)), where=mean > 0))


def put(table: Table, layers: Counts, ranks: Counts, experts: Counts) -> Table:
    """A table with one more expert on one rank in each of these (distinct) layers, in the rank's first free slot.

    Changes the table given, and adds a column to it where a rank has no free slot.
    """
    free = table[layers, ranks] == EMPTY
    if not free.any(axis=1).all():
        table = np.concatenate([table, np.full((*table.shape[:2], 1), EMPTY, table.dtype)], axis=2)
        free = table[layers, ranks] == EMPTY
    table[layers, ranks, free.argmax(axis=1)] = experts
    return table
