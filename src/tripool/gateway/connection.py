"""One HTTP connection, bounded in bytes and in time: uvicorn's own reads and waits without bounds.

| phase | waiting for | bound |
|---|---|---|
| head | the request line and all headers | 64 KiB, 100 headers, 10 s; then 431 or 408 |
| body | the rest of the request | the application's own; little may surround the chunks, trailers are dropped |
| working | nothing: the client waits for the answer | the write deadline |
| leftover | the rest of a body whose request was already answered | 8 MiB, 5 s |
| idle | another request | 20 s |
| refused | the client to read the refusal | 8 MiB, 2 s |

In every phase a client with bytes to read must take 16 KiB, or all there are, within 30 s; the application bounds the
time of a whole answer (`gateway/stream.py`). Pipelined requests are dropped, and the connection is closed after the
current answer: clients must be prepared for that (RFC 9112, 9.3.2), and the end of a connection is then always
detected at once.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tripool.errors import TripoolError
from tripool.gateway import refusals
from tripool.gateway.connection_limits import CLAIM, CONNECTION_END, SLOW_READER, ConnectionEnd, ConnectionLimits
from tripool.gateway.connection_table import Claim, ConnectionTable
from tripool.gateway.framing import body_head, check_framing


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()
    WORKING = auto()
    LEFTOVER = auto()
    IDLE = auto()
    REFUSED = auto()


_BOUNDED = {_Phase.HEAD: "head_s", _Phase.LEFTOVER: "leftover_s", _Phase.IDLE: "idle_s", _Phase.REFUSED: "refused_s"}

_AT_ONCE_BYTES, _PAUSE_S = 2**18, 0.02
"""Bytes dropped at full speed; beyond it in pieces with pauses: a few megabytes a second."""


class _StopParsing(Exception):
    """Raised inside the parser to stop it."""


class Connection(HttpToolsProtocol):
    """`on_ended` is called with the code of every refusal and cut below the application."""

    def __init__(
        self,
        *args: Any,
        table: ConnectionTable[Connection],
        limits: ConnectionLimits,
        on_ended: Callable[[str], object],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.url = b""
        self._table, self._limits, self._on_ended = table, limits, on_ended
        self._end = ConnectionEnd(self._cut)
        self._phase = _Phase.HEAD
        self._deadline: asyncio.TimerHandle | None = None
        self._take_deadline: asyncio.TimerHandle | None = None
        self._known = False
        """Whether a complete head was received before."""
        self._begun = False
        self._head_complete = False
        self._message_complete = False
        self._num_headers = 0
        self._head_bytes = 0
        """As parsed. An unfinished header that the parser buffers is counted in `_raw_bytes` only."""
        self._raw_bytes = 0
        """Bytes of this message's current part (head or body), except the piece in which it began."""
        self._body_bytes = 0
        self._unwanted_bytes = 0
        self._substituted = False
        """The parser is fed a substitute for the head that another parser has read."""
        self._ignoring = False
        """Received bytes are ignored from now on."""
        self._refusal: TripoolError | None = None

    # ---- callbacks of the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._limits.buffered_bytes)
        self._table.waits(self, known=False)
        self._set_deadline(self._limits.head_s)
        victim = self._table.superfluous(self)
        if victim is self:
            self._refuse(refusals.TooManyConnections("all connections are in use", hint="try again in a moment"))
        elif victim is not None:
            victim.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.closed(self)
        for timer in (self._deadline, self._take_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            self._drop(len(data))
            return
        if self._working():
            self._stop_listening()
            return
        before = self._phase
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:  # an upgrade is offered, not accepted: answered as HTTP/1.1
            self._stop_listening()
        except httptools.HttpParserError:
            if self._working():  # the request was valid; what follows it is not
                self._stop_listening()
            else:
                hint = "this is an HTTP/1.1 port, without TLS"
                self._refuse(self._refusal or refusals.NotHttp("this is not an HTTP request", hint=hint))
        else:
            self._enter(self._phase_now())
            if self._phase is before:
                self._check_size(len(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching()

    def _feed(self, data: bytes) -> None:
        """After an upgrade offer, which Java's client sends with every request, the parser treats what follows as
        another protocol: so the body goes to a new parser that has not seen the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                head, data = body_head(self.headers), data[offer.args[0] :]
                if head is None:
                    raise
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in the base class
            self._substituted = True
            self.parser.feed_data(head)
            self._substituted = False

    # ---- callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._substituted:
            return
        if self._working():
            raise _StopParsing
        super().on_message_begin()
        self._begun, self._head_complete, self._message_complete = True, False, False
        self._num_headers = self._head_bytes = self._raw_bytes = self._body_bytes = self._unwanted_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self._substituted:
            return
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # a trailer; it is not used and must not pass for a header
        self._num_headers += 1
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._substituted:
            return
        try:
            check_framing(self.headers, self.parser.get_http_version())
        except refusals.NotHttp as error:
            self._refusal = error
            raise _StopParsing from error
        self._known = self._head_complete = True
        self._raw_bytes = 0
        self.scope[CONNECTION_END], self.scope[CLAIM] = self._end, self.claim  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and body_head(self.headers) is not None:
            return  # not really: the body follows
        self._message_complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # Replaces the base class's: requests are never pipelined, and the idle time is one of our phases.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._watch_reader()
            return
        self.flow.resume_reading()
        self._enter(self._phase_now())

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _working(self) -> bool:
        """Whether a complete request waits for its answer."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _phase_now(self) -> _Phase:
        if not self._head_complete:
            return _Phase.HEAD
        if self.cycle.response_complete:
            return _Phase.IDLE if self._message_complete else _Phase.LEFTOVER
        return _Phase.WORKING if self._message_complete else _Phase.BODY

    def _enter(self, phase: _Phase) -> None:
        """The deadline of a phase counts from its beginning, however much arrives meanwhile."""
        if phase is self._phase:
            return
        self._phase = phase
        if phase is _Phase.WORKING:
            self._table.works(self)
        else:
            self._table.waits(self, known=self._known and phase is not _Phase.REFUSED)
        bound = _BOUNDED.get(phase)
        self._set_deadline(None if bound is None else getattr(self._limits, bound))

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        if self._phase is _Phase.HEAD and self._begun:
            seconds = self._limits.head_s
            self._refuse(
                refusals.HeadTooSlow(f"the headers were not complete after {seconds:g} s", hint="send them at once")
            )
        elif self._phase in (_Phase.HEAD, _Phase.IDLE):
            self._close()
        else:
            self._abort()

    def claim(self, tenant: str, *, shared: bool) -> tuple[Claim, bool]:
        """`tenant` claims this connection for its request. Also returns whether the request is complete."""
        if self._phase is _Phase.REFUSED:
            return Claim.ALL_FULL, True
        whole = self._message_complete
        verdict = self._table.claim(self, tenant, shared=shared, sending=not whole)
        if verdict is Claim.ALL_FULL and whole and (victim := self._table.sending_longest()) is not None:
            victim.make_room()
            verdict = self._table.claim(self, tenant, shared=shared)
        return verdict, whole

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.head_bytes or self._num_headers > self._limits.num_headers:
            self._refusal = self._head_too_large()
            raise _StopParsing

    def _check_size(self, num_bytes: int) -> None:
        """After a piece that lies within one phase."""
        self._raw_bytes += num_bytes
        limits = self._limits
        if self._phase is _Phase.HEAD and self._raw_bytes > limits.head_bytes:
            self._refuse(self._head_too_large())
        elif self._phase is _Phase.BODY:
            around = self._raw_bytes - self._body_bytes
            if around > limits.head_bytes + limits.frame_bytes * self._body_bytes:
                self._refuse(
                    refusals.HeadTooLarge("the chunk framing is larger than the body", hint="send larger chunks")
                )
        elif self._phase is _Phase.LEFTOVER:
            self._drop(num_bytes)

    def _head_too_large(self) -> refusals.HeadTooLarge:
        hint = f"at most {self._limits.head_bytes} bytes and {self._limits.num_headers} headers"
        return refusals.HeadTooLarge("the request line and headers are too large", hint=hint)

    def _drop(self, num_bytes: int) -> None:
        """Slowly, if it is much: reading dropped bytes must not delay other requests."""
        self._unwanted_bytes += num_bytes
        if self._unwanted_bytes > self._limits.unwanted_bytes:
            self._abort()
        elif self._unwanted_bytes > _AT_ONCE_BYTES:
            self.transport.pause_reading()
            self.loop.call_later(_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Closed in favour of a newer connection."""
        self._table.closed(self)
        self._end_for(refusals.TooManyConnections.code)
        if self._phase is _Phase.IDLE:
            self._close()
        else:
            self._abort()

    def _stop_listening(self) -> None:
        """The connection ends after the current answer."""
        self._ignoring = True
        if self.cycle.response_complete:
            self._close()
        else:
            self._enter(_Phase.WORKING)
            self.cycle.keep_alive = False

    def _refuse(self, error: TripoolError) -> None:
        """Send the error, below the application, and close."""
        if self.transport.is_closing():
            return
        self._end_for(error.code)
        cycle, self._ignoring = self.cycle, True
        if cycle is not None and not cycle.response_complete:
            # For the application the client has disconnected; whatever it still sends is dropped.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self._abort()
                return
        path = self.url.decode("latin-1").partition("?")[0]
        body = json.dumps(refusals.error_shape(error, refusals.dialect_of(path))).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}\r\n" for name, value in (headers | refusals.error_headers(error)).items()]
        self.transport.write(STATUS_LINE[error.status] + "".join(lines).encode() + b"\r\n" + body)
        self.transport.write_eof()
        self.flow.resume_reading()  # what it still sends is dropped, and its disconnect is detected
        self._enter(_Phase.REFUSED)

    def _abort(self) -> None:
        """At once, with a reset: the system would otherwise keep the unsent bytes and the connection."""
        line = self.transport.get_extra_info("socket")
        if line is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _close(self) -> None:
        self.transport.close()
        self._watch_reader()

    def _cut(self, reason: str) -> None:
        """The application ends the connection."""
        if not self.transport.is_closing():
            self._end_for(reason)
            self._abort()

    def _end_for(self, reason: str) -> None:
        self._end.reason = reason
        self._on_ended(reason)

    # ---- slow readers ------------------------------------------------------------------------------------------------

    def _watch_reader(self) -> None:
        if self._take_deadline is None:
            size = self.transport.get_write_buffer_size()
            self._take_deadline = self.loop.call_later(self._limits.take_s, self._look_at_reader, size)

    def _stop_watching(self) -> None:
        if self._take_deadline is not None:
            self._take_deadline.cancel()
            self._take_deadline = None

    def _look_at_reader(self, size_before: int) -> None:
        """Nothing is written meanwhile, so a smaller buffer means that the client has read."""
        self._take_deadline = None
        size = self.transport.get_write_buffer_size()
        if size and size_before - size < self._limits.taken_bytes:
            self._end_for(SLOW_READER)
            self._abort()
        else:
            self._watch_reader()
