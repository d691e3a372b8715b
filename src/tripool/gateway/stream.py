"""Sends answers with raw ASGI sends, one per token, and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from math import inf
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tripool.answer import Answer, Delta
from tripool.core import TokenEvent
from tripool.errors import SlowReader, TripoolError
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.connection_limits import SLOW_READER, cut_off, cut_off_because
from tripool.gateway.event_ids import EventIds
from tripool.gateway.job import Job
from tripool.gateway.record import Record, State
from tripool.gateway.respond import Formatter
from tripool.gateway.schema_check import SchemaCheck
from tripool.token_stream import MAX_UNREAD, Tally

# A connection only sees whether anything is read at all (`gateway/connection.py`). A client that reads a little now and
# then would keep its whole answer in memory for hours, so the time for a whole answer is bounded too.
SPARE_S = 30.0
BYTES_PER_S = 2**14


class SlowReaderLimit:
    """30 s of waiting for a client in all; every 16 KiB that it reads gives a second back."""

    def __init__(self) -> None:
        self._left_s = SPARE_S

    def lasts(self, num_bytes: int, waited_s: float) -> bool:
        """Call after sending so many bytes, which took `waited_s`. False: the client is too slow."""
        self._left_s = min(SPARE_S, self._left_s + num_bytes / BYTES_PER_S) - waited_s
        return self._left_s >= 0


Headers = list[tuple[bytes, bytes]]
UNENFORCED = b"x-tripool-unenforced"
_MAX_HEADER_BYTES = 2048
_PART_BYTES = 2**16
"""Size of one send of a body: other tasks run in between."""


class AnswerResponse(Response):
    """Runs a job while its client is connected. An error before the first byte is raised and so gets a status.

    Runs inside the context manager `in_flight`; `on_end` is called once, however it ends.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        answers: Sequence[Answer],
        formatter: Formatter,
        record: Record,
        *,
        clock: Callable[[], float],
        check: SchemaCheck,
        ids: EventIds | None = None,
        finished: Callable[[str, Sequence[int]], object] | None = None,
        in_flight: Callable[[], AbstractContextManager[None]],
        on_end: Callable[[Record], object],
    ) -> None:
        """`ids`: of the events of a stream; `finished` gets a request that is done, and the tokens of its choices."""
        # The base class's constructor would render a body, and there is none yet.
        self.background = None
        self._job, self._backend, self._formatter, self._record = job, backend, formatter, record
        self._answers = answers
        for answer in answers:
            answer.keeps_logprobs = False  # they are formatted as they arrive
        self._tally = Tally(inf)
        self._clock, self._patience = clock, SlowReaderLimit()
        self._scope: Scope = {}
        self._in_flight, self._on_end, self._check = in_flight, on_end, check
        self._ids, self._finished = ids, finished or (lambda request_id, lengths: backend.cancel(request_id))
        self._checked: dict[str, Any] = {}
        self._places = {answer.request.id: (i, answer) for i, answer in enumerate(answers)}
        self._n = job.requests[0].params.n

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._record.look = self._explain_now
        try:
            with self._in_flight():
                await _while_connected(receive, self._stream(send) if self._job.stream else self._whole(send))
        except TripoolError as error:
            self._end_record("failed", error.code)
            raise
        finally:  # a disconnect and a shutdown arrive here without an error
            self._explain_all()
            failed = isinstance(sys.exception(), Exception)
            self._end_record("failed" if failed else "cancelled", None if failed else cut_off_because(scope))
            self._on_end(self._record)

    async def _whole(self, send: Send) -> None:
        async with aclosing(self._backend.stream(*self._job.requests, watcher=self._tally)) as events:
            async for event in events:
                found = self._take(event)
                if found is not None:
                    self._formatter.take(*found)
        await self._generated()
        body = await _gathered(self._formatter.whole(self._answers, self._facts()))
        num_bytes = str(sum(map(len, body))).encode()
        await _start(send, b"application/json", [*self._own_headers(), (b"content-length", num_bytes)])
        body.reverse()
        while body:
            part = body.pop()
            await self._send(send, part, more=bool(body))
            if body:
                await asyncio.sleep(0)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """A client that reads too slowly is cut off, and what is buffered meanwhile is bounded."""
        begun_s = self._clock()
        self._tally.max_unread = MAX_UNREAD
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._tally.max_unread = inf
        if not self._patience.lasts(len(body), self._clock() - begun_s) and not cut_off(self._scope, SLOW_READER):
            raise SlowReader("the client reads this answer too slowly", hint="read faster")

    async def _stream(self, send: Send) -> None:
        opened: set[int] = set()  # choices that have begun
        started, ids, chunk = False, self._ids, self._formatter.chunk
        try:
            async with aclosing(self._backend.stream(*self._job.requests, watcher=self._tally)) as events:
                async for event in events:
                    found = self._take(event)
                    if found is None:
                        continue
                    index, delta = found
                    body = chunk(index, delta)
                    if index not in opened:
                        opened.add(index)
                        body = self._formatter.opening(index, self._places[event.request_id][1]) + (body or b"")
                    if ids is not None:
                        body = ids.token(index, event.token_id, body)
                    if not started and (body or ids is None):
                        started = True
                        await self._start_stream(send)
                    if body:
                        await self._send(send, body)
            await self._generated()
            last = self._formatter.closing(self._answers, self._facts())
            if not opened:  # cancelled by another request, before its first token
                last = self._formatter.opening(0, self._answers[0]) + last
            last = last if ids is None else ids.closing(last)
            if not started:
                await self._start_stream(send)
        except TripoolError as error:
            if not started:
                raise
            self._end_record("failed", error.code)
            last = self._formatter.error(error)
        await send({"type": "http.response.body", "body": last})

    async def _start_stream(self, send: Send) -> None:
        headers = [*self._own_headers(), (b"cache-control", b"no-cache")]
        await _start(send, self._formatter.stream_type, headers)

    async def _generated(self) -> None:
        """All events were read. Another request may have cancelled this one."""
        self._end_record("finished" if all(answer.done for answer in self._answers) else "cancelled")
        job = self._job
        if job.unenforced:
            tenant = job.requests[0].slo.tenant
            self._checked = await self._check.check(
                job.unenforced, self._answers, tenant, calls=job.calls, thinks=job.thinks
            )

    def _take(self, event: TokenEvent) -> tuple[int, Delta] | None:
        """A delta with its index over HTTP. A request that is done before its engine knows is cancelled."""
        position, answer = self._places[event.request_id]
        delta = answer.take(event)
        if delta is None:
            return None
        self._record.token(event)
        if delta.finish_reason is not None and answer.done:
            self._record.placements[position] = self._backend.explain(event.request_id)
            self._finished(event.request_id, answer.lengths)
        return position * self._n + delta.choice, delta

    def _explain_all(self) -> None:
        """What the backend knows of unfinished requests: above all, which limit held them back."""
        self._record.look = None
        if len(self._record.placements) < len(self._places):
            self._record.placements = {**self._explain_now(), **self._record.placements}

    def _explain_now(self) -> dict[int, Facts]:
        found = {position: self._backend.explain(request_id) for request_id, (position, _) in self._places.items()}
        return {position: facts for position, facts in found.items() if facts}

    def _end_record(self, state: State, error_code: str | None = None) -> None:
        """The first call sets the final state."""
        if self._record.state == "open":
            self._record.ended(state, self._answers, error_code, self._tally)

    def _facts(self) -> dict[str, Any]:
        facts, unenforced = self._record.facts(), self._job.unenforced
        return facts | {"unenforced": unenforced.places, "checked": self._checked} if unenforced else facts

    def _own_headers(self) -> Headers:
        own = [(b"x-request-id", self._job.request_id.encode())]
        if self._job.unenforced:
            own.append((UNENFORCED, _listed(self._job.unenforced.places)))
        return own


def _listed(places: Sequence[str]) -> bytes:
    """For a header, however long they are and whatever characters a client's names have."""
    return b", ".join(quote(place, safe="/ $").encode() for place in places)[:_MAX_HEADER_BYTES]


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Cancel the work, and with it the engine's part, when the client disconnects."""
    working, hung_up = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hung_up.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working, hung_up})
    if not working.cancelled():
        working.result()


async def _gathered(pieces: Iterator[bytes]) -> list[bytes]:
    """A body in parts of some size."""
    parts: list[bytes] = []
    part, size = [], 0
    for piece in pieces:
        part.append(piece)
        size += len(piece)
        if size >= _PART_BYTES:
            parts.append(b"".join(part))
            part, size = [], 0
            await asyncio.sleep(0)
    return [*parts, b"".join(part)]


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, content_type: bytes, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *headers]})
