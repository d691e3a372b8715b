"""Keeps answers under idempotency keys where gateway and engine share a process: computes each once, for all readers.

A task reads the backend's stream and hands each token to those who read the answer now (`router/kept.py`). A client
that hangs up leaves; the task goes on for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from math import inf

from tripool.core import Request, ServingStats, TokenEvent
from tripool.errors import RequestFailed, TripoolError
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.idempotency import KeptBackend
from tripool.router.held import Taken
from tripool.router.kept import KeptAnswers
from tripool.router.kept_types import AnswerChanged, Claim, Count, KeptLimits, Keyed, Part, Start
from tripool.tenants import Tenant
from tripool.token_stream import Tally, TokenStream, Watcher

_LOG = logging.getLogger("tripool.gateway")
_TICK_S = 0.25


class LocalKeeper:
    """`on_count` logs usage. Used on the event loop that serves HTTP."""

    def __init__(
        self, clock: Callable[[], float], on_count: Callable[[Count], object], limits: KeptLimits | None = None
    ) -> None:
        self.kept = KeptAnswers(limits)
        self._clock, self._on_count = clock, on_count
        self._streams: dict[str, TokenStream] = {}
        """By the readers' ids."""
        self._backends: dict[str, Backend] = {}
        """Of what is computed, by request id."""
        self._pumps: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def repeats(self, tenant: Tenant, name: str) -> bool:
        return self.kept.repeats(tenant.name, name)

    async def claim(self, keyed: Keyed, tenant: Tenant) -> Claim:
        claim = self.kept.claim(keyed, tenant, self._clock())
        self._settle()
        return claim

    def backend(self, backend: Backend, model: str, keyed: Keyed, tenant: Tenant) -> KeptBackend:
        return _LocalJob(self, backend, model, keyed, tenant)

    async def stream(
        self, backend: Backend, model: str, keyed: Keyed, tenant: Tenant, requests: Sequence[Request],
        watcher: Watcher | None,
    ) -> AsyncGenerator[TokenEvent, None]:  # fmt: skip
        stream = TokenStream(requests, watcher)
        self.kept.now_s = self._clock()
        parts, starts = self.kept.submit(keyed, tenant, model, requests, b"")
        for part, request in zip(parts, requests, strict=True):
            for known in part.progress.events(request.id):
                stream.put(known)
            if request.id in part.readers:
                self._streams[request.id] = stream
        if starts:
            self._begin(backend, starts)
        self._settle()
        try:
            while (event := await stream.read()) is not None:
                yield event
        finally:
            for request in requests:
                self._leave(request.id)
            self._settle()

    def stopped(self, reader_id: str, lengths: Sequence[int]) -> None:
        stream = self._streams.pop(reader_id, None)
        if stream is not None:
            stream.cancelled(reader_id)
            self.kept.stopped(reader_id, lengths)
            self._settle()

    def cancel(self, reader_id: str) -> None:
        stream = self._streams.get(reader_id)
        if stream is not None:
            stream.cancelled(reader_id)
            self._leave(reader_id)
            self._settle()

    def canonical(self, reader_id: str) -> str:
        part = self.kept.of_reader(reader_id)
        return reader_id if part is None else part.request_id

    def _leave(self, reader_id: str) -> None:
        self._streams.pop(reader_id, None)
        self.kept.now_s = self._clock()
        self.kept.left(reader_id)

    # ---- what is computed -------------------------------------------------------------------------------------------

    def _begin(self, backend: Backend, starts: Sequence[Start]) -> None:
        parts = {start.request.id: start.part for start in starts}
        self._backends |= dict.fromkeys(parts, backend)
        task = asyncio.get_running_loop().create_task(self._pump(backend, parts, [start.request for start in starts]))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def _pump(self, backend: Backend, parts: dict[str, Part], requests: Sequence[Request]) -> None:
        """What there is already of a part is computed once more, and compared."""
        error: TripoolError | None = None
        try:
            async with aclosing(backend.stream(*requests, watcher=Tally(inf))) as events:
                async for event in events:
                    self._take(parts[event.request_id], event)
        except TripoolError as raised:
            error = raised
        except Exception:
            error = RequestFailed.of(requests[0].id)
            raise
        finally:
            self.kept.now_s = self._clock()
            for part in parts.values():
                self._backends.pop(part.request_id, None)
                if part.running:  # else its end was found, or nobody wanted it any more
                    self._fail(part, error or RequestFailed.of(part.request_id))
            self._settle()

    def _take(self, part: Part, event: TokenEvent) -> None:
        if not part.running:
            return
        taken = self.kept.take(part, event)
        if taken is Taken.OTHER:
            self._cancel(part.request_id)
            self._fail(part, AnswerChanged("the answer was computed again, and is another one"))
        elif taken is Taken.NEW:
            for reader_id in list(part.readers):
                own = event if reader_id == event.request_id else event.of_request(reader_id, event.stages)
                if not self._streams[reader_id].put(own):  # it does not read
                    self._leave(reader_id)
        if part.running and part.progress.done:
            self.kept.now_s = self._clock()
            for reader_id in part.readers:
                del self._streams[reader_id]
            self.kept.ended(part)
        if self.kept.cancels or self.kept.counts:
            self._settle()

    def _fail(self, part: Part, error: TripoolError) -> None:
        for reader_id in part.readers:
            self._streams.pop(reader_id).fail(error)
        self.kept.failed(part)

    def _cancel(self, request_id: str) -> None:
        backend = self._backends.pop(request_id, None)
        if backend is not None:
            backend.cancel(request_id)

    def _settle(self) -> None:
        cancels, self.kept.cancels = self.kept.cancels, []
        for _, request_id in cancels:
            self._cancel(request_id)
        counts, self.kept.counts = self.kept.counts, []
        for count in counts:
            self._on_count(count)
        self.kept.changed.clear()  # there is no log
        self.kept.removed.clear()
        if self._timer is None and len(self.kept):
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.kept.tick(self._clock())
        self._settle()


class _LocalJob:
    def __init__(self, keeper: LocalKeeper, backend: Backend, model: str, keyed: Keyed, tenant: Tenant) -> None:
        self._keeper, self._backend, self._model, self._keyed, self._tenant = keeper, backend, model, keyed, tenant

    @property
    def alive(self) -> bool:
        return self._backend.alive

    @property
    def context_tokens(self) -> int:
        return self._backend.context_tokens

    def stats(self) -> ServingStats:
        return self._backend.stats()

    def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        return self._keeper.stream(self._backend, self._model, self._keyed, self._tenant, requests, watcher)

    def cancel(self, request_id: str) -> None:
        self._keeper.cancel(request_id)

    def finished(self, request_id: str, lengths: Sequence[int]) -> None:
        self._keeper.stopped(request_id, lengths)

    def explain(self, request_id: str) -> Facts:
        return self._backend.explain(self._keeper.canonical(request_id))
