"""Virtual time: a heap of events, and the trace of what they did. Pure; the same calls give the same order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any
from zlib import crc32


class Clock:
    def __init__(self, trace: Callable[[str], None] | None) -> None:
        self.now_s = 0.0
        self.num_pending = 0
        """Events that the end has to wait for."""
        self.trace_hash = 0
        self._trace = trace
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Events of one time happen in the order in which they were planned."""
        self._serial += 1
        heappush(self._events, (time_s, self._serial, action, args))

    def expect(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Something that the end has to wait for."""
        self.num_pending += 1
        self.at(time_s, self._come, action, args)

    def step(self) -> None:
        self.now_s, _, action, args = heappop(self._events)
        action(*args)

    def note(self, what: str) -> None:
        self.trace_hash = crc32(what.encode(), self.trace_hash)
        if self._trace is not None:
            self._trace(f"{self.now_s:9.4f}  {what}")

    def _come(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.num_pending -= 1
        action(*args)
