"""A thread pool for blocking work before admission: fair between tenants, with a bounded queue.

Of the waiting tenants, the one with the fewest running pieces is next, then the one whose last piece started longest
ago. So a tenant's second piece waits behind every other tenant's first, and a named tenant never has all threads, so
that others need not wait for its pieces to end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tripool.errors import Overloaded

T = TypeVar("T")

_SHARE = 0.25
"""Largest share of the queue for a named tenant. On a server without keys all are one unnamed tenant."""


@dataclass(slots=True, eq=False)
class _Piece:
    work: Callable[[], Any]
    size: int
    started: asyncio.Future[Future[Any]]


class FairPool:
    """Used from one event loop. `max_waiting` is in the units of the pieces' sizes."""

    def __init__(self, name: str, *, num_threads: int, max_waiting: int, max_wait_s: float = 30.0) -> None:
        self._name, self._num_threads, self._max_waiting, self._max_wait_s = name, num_threads, max_waiting, max_wait_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tripool-{name}")
        self._waiting: dict[str, deque[_Piece]] = {}
        """By tenant; no entry where nothing waits."""
        self._waiting_size: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._num_started = 0
        self._last_started: dict[str, int] = {}

    async def run(self, tenant: str, work: Callable[[], T], *, size: int = 1) -> T:
        """The result of `work`. Raises Overloaded when the queue is full, or after too long a wait."""
        self._check_room(tenant, size)
        loop = asyncio.get_running_loop()
        piece = _Piece(work, size, loop.create_future())
        self._waiting.setdefault(tenant, deque()).append(piece)
        self._waiting_size[tenant] += size
        self._start(loop)
        try:
            async with asyncio.timeout(self._max_wait_s):
                running = await piece.started
        except TimeoutError as error:
            message = f"waited {self._max_wait_s:g} s for a thread ({self._name})"
            raise Overloaded(message, hint="try again later", retry_after_s=self._max_wait_s) from error
        finally:
            self._take_out(tenant, piece)
        result: T = await asyncio.wrap_future(running)
        return result

    def _check_room(self, tenant: str, size: int) -> None:
        """A tenant with nothing waiting may always queue one piece: bodies are bounded elsewhere."""
        own, total = self._waiting_size[tenant], self._waiting_size.total()
        most = self._max_waiting * _SHARE if tenant else self._max_waiting
        if own and (own + size > most or total + size > self._max_waiting):
            raise Overloaded(f"the queue is full ({self._name})", hint="try again in a moment")

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._running.total() < self._num_threads:
            threads = self._num_threads
            may = [name for name in self._waiting if self._running[name] < max(1, threads - bool(name))]
            if not may:
                return
            tenant = min(may, key=lambda name: (self._running[name], self._last_started.get(name, 0)))
            piece = self._waiting[tenant][0]
            self._take_out(tenant, piece)
            if piece.started.done():  # cancelled
                continue
            self._running[tenant] += 1
            self._num_started += 1
            self._last_started[tenant] = self._num_started
            running = self._threads.submit(piece.work)
            running.add_done_callback(partial(self._done, loop, tenant))
            piece.started.set_result(running)

    def _done(self, loop: asyncio.AbstractEventLoop, tenant: str, _: Future[Any]) -> None:
        """Runs in the worker thread."""
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._ended, loop, tenant)

    def _ended(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        self._running[tenant] -= 1
        self._running += Counter()  # drops zero counts
        if len(self._last_started) > 1024:
            self._last_started = {name: n for name, n in self._last_started.items() if name in self._waiting}
        self._start(loop)

    def _take_out(self, tenant: str, piece: _Piece) -> None:
        """Remove it if it still waits."""
        queue = self._waiting.get(tenant)
        if queue is None or piece not in queue:
            return
        queue.remove(piece)
        self._waiting_size[tenant] -= piece.size
        if not queue:
            del self._waiting[tenant], self._waiting_size[tenant]
