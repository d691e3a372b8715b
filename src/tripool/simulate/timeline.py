"""Virtual time in whole femtoseconds: sums of step times are exact, so many steps at once end when single ones would.

Events of one time happen by kind, then by whose they are, then as they were planned. None of these depends on how many
events there were before, so that a run that skips quiet steps and one that takes each of them agree. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil
from typing import Any
from zlib import crc32

FS = 10**15
"""In a second."""
_UP = 1e15 * (1.0 + 2.0**-51)

STEP, ARRIVAL, TICK, FAULT = range(4)
"""Kinds of events, in the order in which those of one time happen."""
GATEWAY = -2
"""Whose events come first; workers count from 0."""


def to_fs(seconds: float) -> int:
    return round(seconds * 1e15)


class Timeline:
    def __init__(self, trace: Callable[[str], None] | None = None) -> None:
        self.now_fs = 0
        self.now_s = 0.0
        self.num_events = 0
        self.num_expected = 0
        """Events that the end has to wait for."""
        self.over = False
        """Set when the remaining events are of no interest."""
        self.trace_hash = 0
        self._trace = trace
        self._events: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def clock(self) -> float:
        return self.now_s

    def at(self, time_fs: int, kind: int, owner: int, action: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._events, (time_fs, kind, owner, self._serial, action, args))

    def call_at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Once the clock shows this time: a rounding error earlier, and a process would wait for it again and again.
        Events of one time happen as they were planned."""
        self._serial += 1
        heappush(self._events, (ceil(time_s * _UP), TICK, GATEWAY, self._serial, action, args))

    def expect(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Something that the end has to wait for."""
        self.num_expected += 1
        self.at(max(self.now_fs, to_fs(time_s)), ARRIVAL, GATEWAY, self._come, action, args)

    def _come(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.num_expected -= 1
        action(*args)

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

    def note(self, what: str) -> None:
        """A line of the trace."""
        self.trace_hash = crc32(what.encode(), self.trace_hash)
        if self._trace is not None:
            self._trace(f"{self.now_s:9.4f}  {what}")
