"""Whether a process ended of what it computed: it was too busy to answer, or took more memory than there is.

Both look like a kill from outside: the signal is the same. What Linux counts tells them apart, and where it does not
count, nothing is held against anyone.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

_BUSY = 0.5
"""Of the time, on a core: a process that was stopped or had no core to run on is not busy."""
_SPAN_S = 2.0
_LEAST_S = 0.5
"""A shorter time says nothing: clock ticks are ten milliseconds."""


class CpuUse:
    """Of one process, over the last seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: deque[tuple[float, float]] = deque()

    def look(self, now_s: float) -> None:
        used_s = _cpu_s(self._pid)
        if used_s is not None:
            self._seen.append((now_s, used_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _SPAN_S:
            self._seen.popleft()

    def is_busy(self, now_s: float) -> bool:
        """Whether it has computed for most of that time."""
        self.look(now_s)
        if not self._seen:
            return False
        (first_s, first_used_s), (last_s, last_used_s) = self._seen[0], self._seen[-1]
        return last_s - first_s >= _LEAST_S and last_used_s - first_used_s >= _BUSY * (last_s - first_s)


def num_oom_kills() -> int:
    """Processes that the kernel has ended for want of memory since it started."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def _cpu_s(pid: int) -> float | None:
    """User and system time of all its threads; None once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
