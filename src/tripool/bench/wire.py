"""Minimal HTTP/1.1 client: persistent connections, one exchange at a time on each, a deadline on every wait.

A body is passed on as it arrives, with one time stamp per read from the socket: thousands of small events a second must
not cost a task switch each.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from errno import EMFILE
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from tripool.errors import InvalidRequest, TripoolError

CONNECT_WITHIN_S = 10.0


class CannotConnect(TripoolError, status=503, code="cannot_connect"):
    """The server cannot be reached, or the connection was lost."""


class ExchangeFailed(Exception):
    """A request without a complete answer. `kind` is short and equal for equal failures."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    tls: bool
    prefix: str
    """Path before `/v1`, for servers behind a proxy."""

    @classmethod
    def parse(cls, url: str) -> Address:
        hint = "like http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest(f"'{url}' is no URL: {error}", hint=hint, param="url") from error
        if parts.scheme not in ("http", "https") or not host or not url.isascii() or any(c.isspace() for c in url):
            raise InvalidRequest(f"'{url}' is no URL of a server", hint=hint, param="url")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


Feed = Callable[[int, bytes, float], None]
"""Called with status, bytes of the body and `perf_counter()`: uvloop's own clock counts whole milliseconds only."""


class _Connection(asyncio.Protocol):
    """`done` is pending while an answer is awaited. The parser is reused for all answers of the connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.open = False
        self.answering = False
        """Whether any byte of the current answer has arrived."""
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._feed: Feed | None = None
        self._status = 0
        self._now_s = 0.0

    def send(self, head: bytes, body: bytes, feed: Feed) -> asyncio.Future[int]:
        """A future of the status, set when the answer is complete."""
        assert self.transport is not None and (self._done is None or self._done.done())
        self._feed, self._done, self.answering = feed, self._loop.create_future(), False
        self.transport.write(head + body)
        return self._done

    @property
    def whole(self) -> bool:
        """Whether the latest answer is complete."""
        return (
            self._done is not None and self._done.done() and not self._done.cancelled() and not self._done.exception()
        )

    def drop(self) -> None:
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement this interface.
        self.transport, self.open = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._fail("cut off", str(exc) if exc else "the server closed the connection before the end")

    def data_received(self, data: bytes) -> None:
        self._now_s, self.answering = perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("garbled", f"no HTTP: {error}")
            self.drop()

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._feed is not None:
            try:
                self._feed(self._status, body, self._now_s)
            except ExchangeFailed as failure:
                self._fail(failure.kind, failure.detail)
                self.drop()

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.open = False
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, kind: str, detail: str) -> None:
        self._feed = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeFailed(kind, detail))


class HttpClient:
    """Opens as many connections as there are concurrent exchanges; idle ones are reused, the latest first."""

    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("the API key holds characters that no header may have", param="api_key")
        self._address = address
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._common = f" HTTP/1.1\r\nHost: {address.authority}\r\nContent-Type: application/json\r\n{key}"
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []

    async def exchange(self, method: str, path: str, body: bytes, feed: Feed, *, timeout_s: float) -> int:
        """The status, after `feed` has received the whole body. Raises ExchangeFailed."""
        head = f"{method} {self._address.prefix}{path}{self._common}Content-Length: {len(body)}\r\n\r\n".encode()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection, reused = await self._connection()
                    try:
                        status = await connection.send(head, body, feed)
                    except ExchangeFailed:
                        # A reused connection may have been closed while the request was sent: nothing was processed.
                        if reused and not connection.answering:
                            continue
                        raise
                    finally:
                        self._keep_or_drop(connection)
                    return status
        except TimeoutError:
            raise ExchangeFailed("timeout", f"no whole answer within {timeout_s:g} s") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.drop()
        self._idle.clear()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                _, connection = await loop.create_connection(
                    _Connection, self._address.host, self._address.port, ssl=self._tls
                )
        except TimeoutError:
            raise ExchangeFailed("connect timeout", f"no connection within {CONNECT_WITHIN_S:g} s") from None
        except ConnectionRefusedError as error:
            raise ExchangeFailed("refused", "nothing listens there") from error
        except OSError as error:
            kind = "too many open files" if error.errno == EMFILE else "cannot connect"
            raise ExchangeFailed(kind, error.strerror or str(error)) from error
        return connection, False

    def _keep_or_drop(self, connection: _Connection) -> None:
        """Reuse a connection whose answer is complete; drop one that was interrupted."""
        if connection.open and connection.whole:
            self._idle.append(connection)
        else:
            connection.drop()
