"""Runs one gRPC call as a request to the HTTP application, so that keys, limits, log, usage and errors are the same.

| the application | the call |
|---|---|
| reads the body | the message, read only now: the caller is known before |
| starts a response with 200 | initial metadata |
| sends a body | one message |
| answers with an error, or ends a stream with one | the call's status, with trailing metadata |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import grpc
from starlette.types import ASGIApp, Scope

from tripool.errors import SlowReader
from tripool.gateway.connection_limits import CLAIM
from tripool.gateway.grpc import GENERATE
from tripool.gateway.grpc.respond import ERROR
from tripool.gateway.grpc.routes import IS_CALL
from tripool.gateway.slo import HEADERS

_READ = frozenset({"authorization", "x-api-key", "x-request-id", "idempotency-key", *HEADERS})
_SHOWN = frozenset({"x-request-id", "x-tripool-unenforced", "retry-after"})
_MAX_CHARS = 1024
"""Of a value in trailing metadata: clients refuse those of more than 8 KiB in all."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""By HTTP status; any other is INTERNAL."""

Message = MutableMapping[str, Any]


class Call:
    """`claim` is what `ConnectionQuota` calls once the tenant is known."""

    def __init__(self, context: Any, *, take_s: float, claim: Callable[..., Any]) -> None:
        self._context, self._take_s, self._claim = context, take_s, claim
        self._has_read = self._replies = False
        self.status = 500
        self._error = bytearray()
        self._shown: list[tuple[str, str]] = []

    async def run(self, app: ASGIApp, path: str, method: str = "POST") -> None:
        """Afterwards `status` is that of HTTP. Only a generation's body is sent."""
        self._replies = path == GENERATE
        with suppress(Exception):  # a mistake of ours: the application has logged it, and answered with 500
            await app(self._scope(path, method), self._receive, self._send)

    async def end(self) -> None:
        """With the error, if there is one."""
        if self.status == 200:
            return
        try:
            error: Mapping[str, Any] = json.loads(self._error)
        except ValueError:
            error = {"message": "internal server error; see the server's log"}
        parts = [(f"x-tripool-{name}", error.get(name)) for name in ("code", "hint", "param")]
        trailing = [*self._shown, *((name, _ascii(value)) for name, value in parts if value)]
        status = _STATUS.get(self.status, grpc.StatusCode.INTERNAL)
        with suppress(TimeoutError):  # a client that reads nothing does not read this either
            async with asyncio.timeout(self._take_s):
                await self._context.abort(status, error["message"][:_MAX_CHARS], tuple(trailing))

    def _scope(self, path: str, method: str) -> Scope:
        given = [
            (name.encode(), value.encode("latin-1", "replace"))
            for name, value in self._context.invocation_metadata()
            if name in _READ and isinstance(value, str)
        ]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*given, (b"content-type", b"application/json")],
            "client": None,
            "server": None,  # and no host: no browser speaks HTTP/2 without TLS, which is all that gRPC accepts
            CLAIM: self._claim,
            IS_CALL: True,
        }

    async def _receive(self) -> Message:
        if self._has_read:
            await asyncio.Event().wait()  # a client that is gone cancels the whole call
        self._has_read = True
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": message, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = ((name.decode(), value.decode()) for name, value in message["headers"])
            self._shown = [(name, value) for name, value in headers if name in _SHOWN]
            return
        body: bytes = message["body"]
        if self.status != 200:
            self._error += body
        elif self._replies and body.startswith(ERROR):
            self._error += body[1:]
            self.status = json.loads(self._error)["status"]
        elif body and self._replies:
            await self._write(body[1:])

    async def _write(self, reply: bytes) -> None:
        try:
            async with asyncio.timeout(self._take_s):
                if self._shown:
                    await self._context.send_initial_metadata(tuple(self._shown))
                    self._shown = []
                await self._context.write(reply)
        except TimeoutError as error:
            raise SlowReader(f"the client read nothing for {self._take_s:g} s", hint="read faster") from error


def _ascii(text: str) -> str:
    """Percent-encoded as gRPC does it with messages."""
    return quote(text[:_MAX_CHARS], safe=_PRINTABLE)
