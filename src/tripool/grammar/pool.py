"""A thread beside the engine's, in which grammars are compiled: llguidance lets go of Python meanwhile, so steps go on.

Fair between tenants: each has one compiled in turn, however many it has waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class CompilePool(Generic[T]):
    """Thread-safe. The thread ends when nothing is left to do, so that nobody has to close it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[T], Callable[[], T]]]] = {}
        """By tenant, the next one first."""
        self._working = False

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, work))
            if not self._working:
                self._working = True
                threading.Thread(target=self._run, name="tripool-grammars", daemon=True).start()
        return future

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            future, work = taken
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 (not swallowed: raised again where the result is asked for)
                future.set_exception(error)
            else:
                future.set_result(result)

    def _next(self) -> tuple[Future[T], Callable[[], T]] | None:
        with self._lock:
            while self._waiting:
                tenant = next(iter(self._waiting))
                queue = self._waiting.pop(tenant)
                future, work = queue.popleft()
                if queue:
                    self._waiting[tenant] = queue  # behind the others
                if future.set_running_or_notify_cancel():
                    return future, work
            self._working = False
            return None
