"""Virtual time in whole femtoseconds: sums of step times are exact, so many steps at once end when single ones would.

Events of one time happen by kind, then by whose they are, then as they were planned. None of these depends on how many
events there were before, so that a run that skips quiet steps and one that takes each of them agree. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

FS = 10**15
"""In a second."""

STEP, ARRIVAL, TICK, FAULT = range(4)
"""Kinds of events, in the order in which those of one time happen."""


def to_fs(seconds: float) -> int:
    return round(seconds * 1e15)


class Timeline:
    def __init__(self) -> None:
        self.now_fs = 0
        self.now_s = 0.0
        self.num_events = 0
        self.over = False
        """Set when the remaining events are of no interest."""
        self._events: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def clock(self) -> float:
        return self.now_s

    def at(self, time_fs: int, kind: int, owner: int, action: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._events, (time_fs, kind, owner, self._serial, action, args))

    def run(self, most: int) -> bool:
        """The next events, at most so many; False when there is none left, or `over` is set."""
        events, now_fs, count = self._events, self.now_fs, 0
        while count < most and events and not self.over:
            time_fs, _, _, _, action, args = heappop(events)
            if time_fs != now_fs:
                now_fs = self.now_fs = time_fs
                self.now_s = time_fs / FS
            count += 1
            action(*args)
        self.num_events += count
        return bool(events) and not self.over
