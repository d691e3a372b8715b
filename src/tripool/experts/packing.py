"""Packs weighted replicas into groups (hosts, ranks) with so many slots each, many batches at once.

Replicas have the number of their expert; numbers are in order of weight, heaviest first. After the last expert come two
more numbers, both of weight 0: a free slot, and a slot that the group does not have.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tripool.experts.placement import Counts, Loads

_FAR = 1e6  # above any load: experts weigh 1 on average
_MOST_PAIRS = 1 << 21  # of replicas compared at once: bounds memory where ranks have hundreds of slots
_LEAST_GAIN = 1e-6


def deal(replicas: Counts, share: Loads, room: Counts) -> Counts:
    """(batch, groups, most slots): replicas (batch, any) dealt in rounds, heaviest first.

    In each round every group with room takes one; the least loaded group takes the heaviest. An expert whose replicas
    extend over two rounds goes first to groups that have fewer of it, so that it is spread as widely as possible.
    """
    batch, groups = room.shape
    width, free = int(room.max()), share.shape[1] - 2
    padding = np.full((batch, int(room.sum(axis=1).max()) + groups), free)
    replicas = np.concatenate([np.sort(np.minimum(replicas, free), axis=1), padding], axis=1)
    rows, columns = np.arange(batch)[:, None], np.arange(groups)
    table = np.full((batch, groups, width), free + 1)
    load = np.zeros((batch, groups))
    begin = np.zeros((batch, 1), np.int64)
    for turn in range(width):
        takes = room > turn
        number = takes.sum(axis=1, keepdims=True)
        held = (table[:, :, :turn] == replicas[rows, begin][:, :, None]).sum(axis=2)
        order = np.argsort(load + held * _FAR + ~takes * _FAR**2, axis=1, kind="stable")
        dealt = np.where(columns < number, replicas[rows, begin + columns], free + 1)
        table[rows, order, turn] = dealt
        load[rows, order] += share[rows, dealt]
        begin += number
    return table


def level(table: Counts, share: Loads, goal: npt.NDArray[np.float64], rounds: int, swaps: Counts | None = None) -> None:
    """Swap replicas between heavy and light groups, in place, until no group of a batch is above its goal (batch,).

    In each round the heavier half of the groups is paired with the lighter half, and each pair makes the one swap that
    brings both loads nearest to each other. A free slot may be swapped too: that is a move. A group never gets an
    expert that it holds. swaps: at most so many of each batch (batch,).
    """
    batch, groups, width = table.shape
    half, free = groups // 2, share.shape[1] - 2
    if width == 1 or half == 0:  # with one slot each, a swap only exchanges names
        return
    load = share[np.arange(batch)[:, None, None], table].sum(axis=2)
    fruitless = np.zeros(batch, np.int64)  # rounds without a swap: the next one pairs otherwise
    for _ in range(rounds):
        order = np.argsort(-load, axis=1, kind="stable")
        heavy, partner = order[:, :half], (np.arange(half) + fruitless[:, None]) % half
        light = np.take_along_axis(order[:, : -half - 1 : -1], partner, axis=1)
        above = (np.take_along_axis(load, heavy, axis=1) > goal[:, None]) & (fruitless < half)[:, None]
        if swaps is not None:
            above &= np.arange(half) < swaps[:, None]
        pair, row = (found[: max(1, _MOST_PAIRS // width**2)] for found in np.nonzero(above.T))
        if not len(row):
            return
        high, low = heavy[row, pair], light[row, pair]
        upper, lower = table[row, high], table[row, low]
        weight_up, weight_down = share[row[:, None], upper], share[row[:, None], lower]
        half_gap = (load[row, high] - load[row, low]) / 2
        miss = np.abs(weight_up[:, :, None] - weight_down[:, None, :] - half_gap[:, None, None])
        both = (upper[:, :, None] == lower[:, None, :]) & (upper < free)[:, :, None]
        miss[both.any(axis=2) | (upper > free)] = np.inf
        miss.transpose(0, 2, 1)[both.any(axis=1) | (lower > free)] = np.inf
        best = miss.reshape(len(row), -1).argmin(axis=1)
        index, up, down = np.arange(len(row)), best // width, best % width
        better = half_gap - miss[index, up, down] > _LEAST_GAIN
        fruitless[row] += 1
        index, row, high, low, up, down = (each[better] for each in (index, row, high, low, up, down))
        fruitless[row] = 0
        if swaps is not None:
            swaps = swaps - np.bincount(row, minlength=batch)
        table[row, high, up], table[row, low, down] = lower[index, down], upper[index, up]
        moved = weight_up[index, up] - weight_down[index, down]
        load[row, high] -= moved
        load[row, low] += moved


def relieve(table: Counts, share: Loads, goal: npt.NDArray[np.float64], rounds: int) -> None:
    """Like `level`, but the busiest group of a batch compares its replicas with those of all others: slower, and for
    the few batches in which heavy groups have to swap among themselves."""
    batch, groups, width = table.shape
    free, most = share.shape[1] - 2, max(1, _MOST_PAIRS // (groups * width * width))
    if width == 1 or groups == 1:
        return
    load = share[np.arange(batch)[:, None, None], table].sum(axis=2)
    stuck = np.zeros(batch, np.bool_)
    for _ in range(rounds):
        (row,) = np.nonzero((load.max(axis=1) > goal) & ~stuck)
        row = row[:most]
        if not len(row):
            return
        high, index = load[row].argmax(axis=1), np.arange(len(row))
        upper, others = table[row, high], table[row]
        weight_up, weight_down = share[row[:, None], upper], share[row[:, None, None], others]
        moved = weight_up[:, :, None, None] - weight_down[:, None]
        worse = np.maximum(load[row, high][:, None, None, None] - moved, load[row][:, None, :, None] + moved)
        same = (upper[:, :, None, None] == others[:, None]) & (upper < free)[:, :, None, None]
        worse[same.any(axis=3) | (upper > free)[:, :, None]] = np.inf
        worse.transpose(0, 2, 3, 1)[same.any(axis=1) | (others > free)] = np.inf
        best = worse.reshape(len(row), -1).argmin(axis=1)
        up, low, down = np.unravel_index(best, worse.shape[1:])
        better = worse[index, up, low, down] < load[row, high] - _LEAST_GAIN
        stuck[row[~better]] = True
        index, row, high, up, low, down = (each[better] for each in (index, row, high, up, low, down))
        table[row, high, up], table[row, low, down] = others[index, low, down], upper[index, up]
        load[row, high] -= moved[index, up, low, down]
        load[row, low] += moved[index, up, low, down]
