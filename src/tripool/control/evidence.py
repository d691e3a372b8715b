"""Whether a process ended because of its own work: too busy to answer, or out of memory.

Both look like an external kill: the signal is the same. Linux's counters distinguish them; where they are missing, a
process is not blamed.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from pathlib import Path

_BUSY = 0.5
"""Share of the time it could have run that it spent on a core: a stopped or waiting process is not busy."""
_LEAST_BUSY = 0.1
"""Smallest share of the whole time with a core: with less, nothing can be concluded."""
_SPAN_S = 2.0
_PF_EXITING = 0x4
_KILLED = 1 << (signal.SIGKILL - 1)
_LEAST_S = 0.5
"""Shortest meaningful time: clock ticks are ten milliseconds."""


class CpuUse:
    """CPU use of one process over the last seconds."""

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
        """Whether it computed for most of that time. A stopped process is not busy."""
        self.look(now_s)
        if not self._seen or is_stopped(self._pid):
            return False
        span_s, used_s, waited_s = (last - first for first, last in zip(self._seen[0], self._seen[-1], strict=True))
        return span_s >= _LEAST_S and was_busy(span_s, used_s, waited_s)


def was_busy(span_s: float, used_s: float, waited_s: float) -> bool:
    """`waited_s`: time spent runnable without a core."""
    return used_s >= _LEAST_BUSY * span_s and used_s >= _BUSY * (span_s - waited_s)


def num_oom_kills() -> int:
    """Number of processes the kernel has killed for lack of memory since boot."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger."""
    try:
        return _stat_of(pid)[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def is_ending(pid: int) -> bool:
    """Whether the process is dead, dying, or killed and not yet on a core again. Its descriptors say so only after its
    memory is given back, which on a loaded machine takes a tenth of a second."""
    try:
        state, flags = (fields := _stat_of(pid))[0], int(fields[6])
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, IndexError):
        return True
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return state in ("Z", "X") or bool(flags & _PF_EXITING) or any(mask & _KILLED for mask in pending)


def is_runnable(pid: int) -> bool:
    """Whether one of its threads runs or waits for a core: the process is slow rather than stuck."""
    try:
        return any(_stat_of(f"{pid}/task/{thread.name}")[0] == "R" for thread in Path(f"/proc/{pid}/task").iterdir())
    except (OSError, IndexError):  # a thread has just ended
        return False


def _stat_of(task: int | str) -> list[str]:
    """Fields of /proc/TASK/stat after the process name."""
    return Path(f"/proc/{task}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def times_of(pid: int) -> tuple[float, float] | None:
    """(CPU seconds of all threads, seconds the first thread waited for a core). None once it is gone."""
    try:
        fields = _stat_of(pid)
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    try:
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not available on every kernel
        waited_s = 0.0
    return used_s, waited_s
