"""Balance while serving: observed loads in, the next expert map out, one step of moves at a time."""

from __future__ import annotations

from collections import deque

import numpy as np

from tripool.experts.balance import balance, least_imbalance
from tripool.experts.expert_map import ExpertMap
from tripool.experts.load_window import LoadWindow
from tripool.experts.moves import MoveStep, plan_moves
from tripool.experts.placement import Counts, Loads, expert_ranks, imbalance

_SPARE = 8
"""A rank has one spare slot for so many experts, and at least one: there replicas of popular experts lie."""
_COPIES = 16
"""Per layer and plan: with one copy per layer and step, a plan takes about so many steps."""
_FAR = 1.2
"""Times the bound: a layer that so many copies leave so uneven is placed anew. The even spread of the start, which
would be felt for dozens of windows, always; later only if that takes at most `_LONG` steps."""
_LONG = 3 * _COPIES
_WINDOW_TOKENS, _WINDOW_TOKENS_PER_RANK = 1000, 125
"""A window has at most so many tokens, and so many per rank: a rank of few has many rows of each token, so that chance
is averaged out sooner, and drift can be followed sooner."""


class Balancer:
    """For an instance whose ranks are all there. A plan that was begun is finished before the next one is made."""

    def __init__(self, first: ExpertMap, top_k: int, hosts: int = 1) -> None:
        """`first`: ranks without experts in it get none. `hosts`: so many have equally many ranks each, in order."""
        self._hosts = hosts
        holders = expert_ranks(first.table)
        num_ranks = int(holders.sum())
        even = -(-first.experts // num_ranks)
        self._slots, self._top_k = (holders * (even + max(1, even // _SPARE))).tolist(), top_k
        tokens = min(_WINDOW_TOKENS, _WINDOW_TOKENS_PER_RANK * num_ranks)
        self._window = LoadWindow(first.layers, first.experts, tokens=tokens)
        self._routed = np.zeros((first.layers, first.experts), np.int64)
        self._steps: deque[MoveStep] = deque()
        self._placed = False
        """A plan was carried out."""
        self.num_copies = 0
        """Replicas copied so far."""

    def step(self, routed: Counts, current: ExpertMap) -> ExpertMap | None:
        """The map to use next; None: the current one. `routed`: rows that each expert has got since the start."""
        new = routed - self._routed
        self._routed = routed
        closed = self._window.add(new, int(new.sum(axis=1).max()) // self._top_k)
        if closed and not self._steps:
            loads = self._window.loads
            self._steps.extend(self._plan(loads, current))
        if not self._steps:
            return None
        step = self._steps.popleft()
        self._placed = self._placed or not self._steps
        self.num_copies += len(step.copies)
        return step.after

    def _plan(self, loads: Loads, current: ExpertMap) -> tuple[MoveStep, ...]:
        table = balance(loads, current.ranks, self._hosts, self._slots, old=current.table, copies=_COPIES)
        steps = plan_moves(current, current.replaced(table), current.layers, loads=loads)
        far = imbalance(table, loads) > _FAR * least_imbalance(loads, self._slots)
        if far.any():
            table[far] = balance(loads[far], current.ranks, self._hosts, self._slots)
            anew = plan_moves(current, current.replaced(table), current.layers, loads=loads)
            if not self._placed or len(anew) <= _LONG:
                return anew
        return steps

    def reset(self) -> None:
        """The map was changed by something else: what was planned no longer fits."""
        self._steps.clear()
