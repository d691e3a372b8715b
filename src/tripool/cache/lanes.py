"""Two threads beside a cache member's loop, one that writes and one that reads, and what they have to tell the loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

_CLOSE_S = 2.0

Job = Callable[[], Callable[[], None]]
"""Runs in a thread and returns a callback for the member's loop."""


class Lane:
    """One thread and its job queue. A daemon thread: a disk that hangs does not keep the process from ending."""

    def __init__(self, name: str, done: Callable[[Callable[[], None]], None]) -> None:
        self._done = done
        self._jobs: deque[Job | None] = deque()
        self._ready = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job | None, *, first: bool = False) -> None:
        (self._jobs.appendleft if first else self._jobs.append)(job)
        self._ready.release()

    def end(self) -> bool:
        """Stop after the current job; returns whether the thread ended in time."""
        self.put(None, first=True)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            job = self._jobs.popleft()
            if job is None:
                return
            self._done(job())


class Lanes:
    """All but the jobs themselves is called in the member's loop."""

    def __init__(self, name: str) -> None:
        self._results: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        """Keeps `_results` and the event descriptor consistent: the descriptor is readable exactly when there are
        results.
        """
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.writer, self.reader = (Lane(f"{name}-{what}", self._finished) for what in ("write", "read"))

    def fileno(self) -> int:
        """Readable when `settle` has something to do."""
        return self._wake

    def settle(self) -> None:
        """Call back for the jobs that are done."""
        if not self._results:
            return
        with self._lock:
            os.eventfd_read(self._wake)
            results, self._results = self._results, []
        for result in results:
            result()

    def close(self) -> bool:
        """Whether both threads have ended: one that hangs still uses what it has."""
        ended = all([self.writer.end(), self.reader.end()])
        if ended:
            os.close(self._wake)
        return ended

    def _finished(self, result: Callable[[], None]) -> None:
        with self._lock:
            self._results.append(result)
            os.eventfd_write(self._wake, 1)
