"""Whether a process ended of what it computed: it was too busy to answer, or took more memory than there is.

Both look like a kill from outside: the signal is the same. What Linux counts tells them apart, and where it does not
count, nothing is held against anyone.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

_BUSY = 0.5
"""Of the time in which it could have run, on a core: one that was stopped, or waited for something, is not busy."""
_LEAST_BUSY = 0.1
"""Of all the time: one that had hardly a core to run on says nothing."""
_SPAN_S = 2.0
_LEAST_S = 0.5
"""A shorter time says nothing: clock ticks are ten milliseconds."""


class CpuUse:
    """Of one process, over the last seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: deque[tuple[float, float, float]] = deque()

    def look(self, now_s: float) -> None:
        used = times_of(self._pid)
        if used is not None:
            self._seen.append((now_s, *used))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _SPAN_S:
            self._seen.popleft()

    def is_busy(self, now_s: float) -> bool:
        """Whether it has computed for most of that time. A stopped process is silent for that reason alone."""
        self.look(now_s)
        if not self._seen or is_stopped(self._pid):
            return False
        span_s, used_s, waited_s = (last - first for first, last in zip(self._seen[0], self._seen[-1], strict=True))
        return span_s >= _LEAST_S and was_busy(span_s, used_s, waited_s)


def was_busy(span_s: float, used_s: float, waited_s: float) -> bool:
    """`waited_s`: for a core, which others had."""
    return used_s >= _LEAST_BUSY * span_s and used_s >= _BUSY * (span_s - waited_s)


def num_oom_kills() -> int:
    """Processes that the kernel has ended for want of memory since it started."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger."""
    try:
        return _stat_of(pid)[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _stat_of(pid: int) -> list[str]:
    """The fields behind the process's name."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def times_of(pid: int) -> tuple[float, float] | None:
    """Of all its threads: on a core, and of the first one, waiting for one. None once it is gone."""
    try:
        fields = _stat_of(pid)
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    try:
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not every kernel counts it
        waited_s = 0.0
    return used_s, waited_s
