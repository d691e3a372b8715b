"""Answers written with raw ASGI sends, one per token, and cancelled when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tripool.answer import Answer, Delta
from tripool.errors import TripoolError
from tripool.gateway.backend import Backend
from tripool.gateway.parse import Job
from tripool.gateway.respond import Shapes, error_event
from tripool.text import Tokenizer


class AnswerResponse(Response):
    """Runs a job while its client listens. What goes wrong before the first byte is raised and so gets a status."""

    def __init__(self, job: Job, backend: Backend, tokenizer: Tokenizer, shapes: Shapes) -> None:
        # The base class's own start would render a body, and there is none yet.
        self.background = None
        self._job, self._backend, self._shapes = job, backend, shapes
        self._answers = [Answer(request, tokenizer) for request in job.requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._stream(send) if self._job.stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        body = self._shapes.whole(self._answers)
        await _start(send, b"application/json", [(b"content-length", str(len(body)).encode())])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        opened: set[int] | None = None  # choices that have begun; None until the first byte is sent
        try:
            async with aclosing(self._deltas()) as deltas:
                async for index, delta in deltas:
                    if opened is None:
                        await _start(send, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
                        opened = set()
                    if self._job.chat and index not in opened:
                        opened.add(index)
                        await _send_more(send, self._shapes.opening(index))
                    chunk = self._shapes.chunk(index, delta)
                    if chunk is not None:
                        await _send_more(send, chunk)
            last = self._shapes.closing(self._answers)
        except TripoolError as error:
            if opened is None:
                raise
            last = error_event(error)
        await send({"type": "http.response.body", "body": last})

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all prompts with their index over HTTP. A request done before its engine knows is cancelled."""
        answers = {answer.request.id: (position, answer) for position, answer in enumerate(self._answers)}
        async with aclosing(self._backend.stream(*self._job.requests)) as events:
            async for event in events:
                position, answer = answers[event.request_id]
                delta = answer.take(event)
                if answer.done:
                    self._backend.cancel(event.request_id)
                if delta is not None:
                    yield position * answer.request.params.n + delta.choice, delta


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Cancel the work, and with it the engine's part, when the client hangs up."""
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


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *headers]})


async def _send_more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
