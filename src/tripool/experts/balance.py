"""Replica placement from loads: how many replicas each expert gets, and which rank holds which.

Hierarchical: replicas by load, then replicas to hosts, then each host's replicas to its ranks; all layers at once. The
next replica always goes to the expert with the highest load per replica, which makes that highest load as low as it can
be. With one slot per rank this is the optimum; `packing` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tripool.errors import ExpertMapError
from tripool.experts.adjust import adjusted
from tripool.experts.packing import deal, level, relieve
from tripool.experts.placement import EMPTY, Counts, Loads, Table, imbalance

_HOST_ROUNDS, _RANK_ROUNDS = 4, 32
_HOST_GOAL, _RANK_GOAL = 1.002, 1.005
_WORSE = 1.025  # times the lower bound: beyond it, changing an old placement did not suffice
_TINY = 1e-9  # of the mean load: an expert without load still is one


def balance(
    loads: npt.ArrayLike, ranks: int, hosts: int, slots: int | Sequence[int], *, old: Table | None = None,
    copies: int | None = None,
) -> Table:  # fmt: skip
    """Place the experts on the ranks: a table (layers, ranks, most slots) of experts, -1 where a slot stays free.

    loads: (layers, experts), not negative. slots: per rank, or one number for all; 0 makes a rank without experts.
    Ranks are numbered host by host. old: a table to change as little as possible; where that does not suffice for a
    layer, the layer is placed anew. copies: about how many a layer may be changed by; then none is placed anew.
    """
    room = np.broadcast_to(np.asarray(slots, np.int64), (ranks,))
    scaled = _scaled(loads, room)
    if old is None:
        return _placed(scaled, room, hosts)
    if old.shape[:2] != (len(scaled), ranks):
        raise ExpertMapError(f"the old placement has {old.shape[1]} ranks, not {ranks}, or other layers")
    kept = adjusted(old, scaled, room, int(room.sum()) if copies is None else copies)
    if copies is not None:
        return kept
    (worse,) = np.nonzero(imbalance(kept, scaled) > _WORSE * least_imbalance(scaled, room))
    if len(worse):
        fresh = _placed(scaled[worse], room, hosts)
        better = imbalance(fresh, scaled[worse]) < imbalance(kept[worse], scaled[worse])
        kept[worse[better]] = fresh[better]
    return kept


def replicas_by_load(loads: Loads, slots: int, most: int) -> Counts:
    """(layers, experts): replicas that minimise the highest load per replica with so many slots, `most` per expert."""
    experts = loads.shape[1]
    # Replicas of at most this load fit into the slots, whatever the loads are: a lower bound to start from.
    spare = slots - experts
    counts = np.ceil(loads * spare / loads.sum(axis=1, keepdims=True)).astype(np.int64).clip(1, most)
    per_replica = np.where(counts < most, loads / counts, 0.0)
    left = np.minimum(slots, experts * most) - counts.sum(axis=1)
    for turn in range(int(left.max(initial=0))):
        (rows,) = np.nonzero(left > turn)
        chosen = per_replica[rows].argmax(axis=1)
        counts[rows, chosen] += 1
        now = counts[rows, chosen]
        per_replica[rows, chosen] = np.where(now < most, loads[rows, chosen] / now, 0.0)
    return np.asarray(counts)


def least_imbalance(loads: npt.ArrayLike, slots: Sequence[int] | npt.NDArray[np.int64]) -> Loads:
    """(layers,): a lower bound of busiest rank over mean rank, for any placement in these slots per rank, however the
    load of an expert is divided among its replicas. The greatest of three:

    1. The mean.
    2. The highest load per replica when replicas are given so that it is lowest: with one slot per rank, the optimum.
    3. With few spare slots, the busiest expert is never alone: if it has c replicas, the rank with the most of its load
       also has the whole load of those experts that find no slot elsewhere, at least the lightest; the least over c.
       With no spare slot, this holds for the n busiest together: two of them share a rank, or n ranks hold them and at
       least the lightest others.
    """
    room = np.asarray(slots, np.int64)
    scaled = _scaled(loads, room)
    experts = scaled.shape[1]
    holders, spare = int((room > 0).sum()), int(room.sum()) - experts
    per_replica = (scaled / replicas_by_load(scaled, int(room.sum()), holders)).max(axis=1)
    ordered = np.sort(scaled, axis=1)
    lightest = np.concatenate([np.zeros((len(scaled), 1)), ordered.cumsum(axis=1)], axis=1)
    replicas = np.arange(1, min(holders, spare + 1) + 1)
    alone = (int(room[room > 0].min()) + replicas - 2 - spare).clip(0, experts - 1)
    with_company = (ordered[:, -1:] / replicas + lightest[:, alone]).min(axis=1)
    if spare == 0:
        number = np.arange(1, min(holders, experts) + 1)
        others = (number * (int(room[room > 0].min()) - 1)).clip(0, experts - number)
        busiest = ordered[:, ::-1][:, : len(number)]
        together = (busiest.cumsum(axis=1) + lightest[:, others]) / number
        together[:, 1:] = np.minimum(together[:, 1:], busiest[:, 1:] + busiest[:, :-1])
        with_company = np.maximum(with_company, together.max(axis=1))
    bound = np.maximum(np.maximum(per_replica, with_company) / (scaled.sum(axis=1) / holders), 1.0)
    return np.asarray(np.where(np.asarray(loads).any(axis=1), bound, 1.0))


def _scaled(loads: npt.ArrayLike, room: npt.NDArray[np.int64]) -> Loads:
    """The loads with a mean of 1 per layer and none of 0; ExpertMapError where nothing can be placed."""
    given = np.asarray(loads, np.float64)
    if given.ndim != 2 or not given.size or not np.isfinite(given).all() or (given < 0).any():
        raise ExpertMapError("loads are a table of layers by experts, of numbers that are not negative")
    if room.ndim != 1 or (room < 0).any() or int(room.sum()) < given.shape[1]:
        raise ExpertMapError(
            f"{int(room.sum())} slots cannot hold {given.shape[1]} experts", hint="give the ranks more slots"
        )
    mean = given.mean(axis=1, keepdims=True)
    return np.asarray(np.divide(given, mean, out=np.ones_like(given), where=mean > 0) + _TINY)


def _placed(loads: Loads, room: npt.NDArray[np.int64], hosts: int) -> Table:
    layers, experts = loads.shape
    ranks, holders = len(room), int((room > 0).sum())
    counts = replicas_by_load(loads, int(room.sum()), holders)
    share = loads / counts
    order = np.argsort(-share, axis=1, kind="stable")  # in packing, an expert's number is its place in this order
    counts, share = np.take_along_axis(counts, order, axis=1), np.take_along_axis(share, order, axis=1)
    share = np.concatenate([share, np.zeros((layers, 2))], axis=1)  # a free slot, no slot
    pieces = np.repeat(np.tile(np.arange(experts), layers), counts.ravel()).reshape(layers, -1)

    host_of = np.arange(ranks) * hosts // ranks
    local_rank = np.arange(ranks) - np.searchsorted(host_of, host_of)
    local_room = np.zeros((hosts, int(local_rank.max()) + 1), np.int64)
    local_room[host_of, local_rank] = room
    total = loads.sum(axis=1)
    on_hosts = pieces[:, None]
    if hosts > 1:
        on_hosts = deal(pieces, share, np.broadcast_to(local_room.sum(axis=1), (layers, hosts)))
        level(on_hosts, share, _HOST_GOAL * total / hosts, _HOST_ROUNDS)
    shares = np.repeat(share, hosts, axis=0)
    on_ranks = deal(on_hosts.reshape(layers * hosts, -1), shares, np.tile(local_room, (layers, 1)))
    goal = np.repeat(_RANK_GOAL * np.maximum(share[:, 0], total / holders), hosts)
    level(on_ranks, shares, goal, _RANK_ROUNDS)
    table = on_ranks.reshape(layers, hosts, local_room.shape[1], -1)[:, host_of, local_rank]
    if hosts > 1:  # what whole hosts could not level, ranks of different hosts can
        level(table, share, goal[::hosts], _RANK_ROUNDS)
    relieve(table, share, goal[::hosts], _RANK_ROUNDS)
    return _named(table, order)


def _named(table: npt.NDArray[np.int64], order: Counts) -> Table:
    """The table by experts instead of their places in the order; a rank's second replica of an expert is dropped."""
    layers = len(order)
    table = np.sort(table, axis=2)
    twice = np.zeros(table.shape, np.bool_)
    twice[:, :, 1:] = table[:, :, 1:] == table[:, :, :-1]
    names = np.concatenate([order, np.full((layers, 2), EMPTY)], axis=1)
    named = names[np.arange(layers)[:, None, None], table]
    return np.where(twice, EMPTY, named).astype(np.int32)
