"""Changes an old placement to fit new loads with few copies: drops and adds replicas, then swaps between ranks."""

from __future__ import annotations

import numpy as np

from tripool.experts.packing import level
from tripool.experts.placement import EMPTY, Counts, Loads, Table, put, replica_counts

_ROUNDS = 32
_GOAL = 1.02  # times the best possible; no nearer, as each swap is two copies
_HEAVY = 0.4  # of a mean rank's load: lighter replicas pack well as they are
_FAR = 1e6  # above any load: experts weigh 1 on average


def adjusted(old: Table, loads: Loads, room: Counts, copies: int) -> Table:
    """(layers, ranks, most slots): the old table changed by about so many copies per layer, in these slots per rank."""
    layers, experts = loads.shape
    held = replica_counts(old, experts)
    wanted = _wanted(held, loads, room, copies)
    left = copies - np.maximum(wanted - held, 0).sum(axis=1)
    share = np.concatenate([loads / wanted, np.zeros((layers, 2))], axis=1)  # a free slot, no slot
    table = _filled(_thinned(old, share, wanted, room), share, wanted, room)
    table = np.sort(np.where(table == EMPTY, experts, table), axis=2)[:, :, : int(room.max())]
    exists = np.arange(table.shape[2]) < room[:, None]
    numbered = np.where(exists, table, experts + 1).astype(np.int64)
    best = np.maximum(share.max(axis=1), loads.sum(axis=1) / max(1, int((room > 0).sum())))
    level(numbered, share, _GOAL * best, _ROUNDS, np.maximum(left, 0) // 2)
    return np.where(numbered < experts, numbered, EMPTY).astype(np.int32)


def _wanted(held: Counts, loads: Loads, room: Counts, copies: int) -> Counts:
    """Replicas of each expert: from those with the least load per replica to those that are heavy for a rank."""
    holders, slots = int((room > 0).sum()), int(room.sum())
    counts = held.clip(1, holders)
    heavy = _HEAVY * loads.sum(axis=1) / holders
    rows = np.arange(len(loads))
    for _ in range(slots):
        spare = slots - counts.sum(axis=1)
        after_loss = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
        share = np.where(counts < holders, loads / counts, 0.0)
        loser, gainer = after_loss.argmin(axis=1), share.argmax(axis=1)
        most, least = share[rows, gainer], after_loss[rows, loser]
        begun = np.maximum(counts - held, 0).sum(axis=1) < copies
        gains = begun & (most > 0) & ((spare > 0) | ((spare == 0) & (most > heavy) & (most > _GOAL * least)))
        loses = (spare < 0) | ((spare == 0) & gains)
        if not (gains | loses).any():
            break
        counts[rows[loses], loser[loses]] -= 1
        counts[rows[gains], gainer[gains]] += 1
    return counts


def _thinned(old: Table, share: Loads, wanted: Counts, room: Counts) -> Table:
    """Without what is above a rank's room, nor replicas beyond the wanted ones: those on heavy ranks go first."""
    table = np.pad(old, ((0, 0), (0, 0), (0, max(0, int(room.max()) - old.shape[2]))), constant_values=EMPTY)
    rows = np.arange(len(table))
    while True:
        surplus = np.pad(replica_counts(table, wanted.shape[1]) > wanted, ((0, 0), (0, 1)))
        above = (table != EMPTY).sum(axis=2) > room
        load = share[rows[:, None, None], table].sum(axis=2) + above * _FAR
        drops = surplus[rows[:, None, None], table] | (above[:, :, None] & (table != EMPTY))
        (layers,) = np.nonzero(drops.any(axis=(1, 2)))
        if not len(layers):
            return table
        score = np.where(drops[layers], load[layers][:, :, None], -1.0).reshape(len(layers), -1)
        place = score.argmax(axis=1)
        table[layers, place // table.shape[2], place % table.shape[2]] = EMPTY


def _filled(table: Table, share: Loads, wanted: Counts, room: Counts) -> Table:
    """With the missing replicas: the heaviest first, each on the lightest rank that has room and not the expert."""
    due = wanted - replica_counts(table, wanted.shape[1])
    while (due > 0).any():
        (layers,) = np.nonzero((due > 0).any(axis=1))
        experts = np.where(due[layers] > 0, share[layers, : due.shape[1]], -1.0).argmax(axis=1)
        held = table[layers]
        load = share[layers[:, None, None], held].sum(axis=2)
        load[((held != EMPTY).sum(axis=2) >= room) | (held == experts[:, None, None]).any(axis=2)] = np.inf
        ranks = load.argmin(axis=1)
        fits = np.isfinite(load[np.arange(len(layers)), ranks])
        due[layers[~fits], experts[~fits]] = 0  # every rank with room has it already: the slot stays free
        layers, ranks, experts = layers[fits], ranks[fits], experts[fits]
        table = put(table, layers, ranks, experts)
        due[layers, experts] -= 1
    return table
