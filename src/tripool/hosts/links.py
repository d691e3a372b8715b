"""The links of this host as its server sends over them: bulk in chunks, within the shares and windows of `traffic`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tripool.hosts.connection import Connection
from tripool.hosts.traffic import BulkWindow, LinkSchedule, Traffic

_LOOK_S = 5e-5
_LONGEST_S = 5e-3


class Links:
    """One for each of this host's addresses that connections have come to."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    def of(self, connection: Connection) -> Link:
        with self._lock:
            return self._links.setdefault(connection.own_address, Link())


class Bulk:
    """What is sent in bulk over one connection."""

    def __init__(self, connection: Connection, link: Link) -> None:
        self._connection, self.link, self._window = connection, link, BulkWindow()

    def send(self, traffic: Traffic, message: msgspec.Struct, buffers: Sequence[memoryview], stalled_s: float) -> None:
        """A message and the bytes that it tells of. Raises OSError after `stalled_s` without progress."""
        with self.link.sending(traffic, self._connection):
            self._connection.send(message)
            for chunk in self.link.chunks(buffers):
                num_bytes = sum(buffer.nbytes for buffer in chunk)
                self.link.wait(self._connection, self._window, traffic, num_bytes, stalled_s)
                self._connection.write(chunk)
                self.link.sent(traffic, num_bytes)

    def send_now(self, traffic: Traffic, message: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        """As `send`, within `Link.sending`, for what somebody waits for: classes below its own wait, it does not."""
        self._connection.send_with(message, buffers)
        self.link.sent(traffic, sum(buffer.nbytes for buffer in buffers))


class Link:
    def __init__(self) -> None:
        self._schedule, self._lock = LinkSchedule(), threading.Lock()

    @contextmanager
    def sending(self, traffic: Traffic, connection: Connection) -> Iterator[None]:
        """While there is something of this class to send."""
        with self._lock:
            self._schedule.begin(traffic, time.monotonic())
        left = 0
        try:
            yield
            left = connection.num_under_way() or 0
        finally:
            with self._lock:
                self._schedule.end(traffic, time.monotonic(), left)

    def sent(self, traffic: Traffic, num_bytes: int) -> None:
        with self._lock:
            self._schedule.sent(traffic, num_bytes, time.monotonic())

    def chunks(self, buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
        chunk: list[memoryview] = []
        left = self._schedule.chunk_bytes
        for buffer in buffers:
            while buffer.nbytes:
                piece, buffer = buffer[:left], buffer[left:]
                chunk.append(piece)
                left -= piece.nbytes
                if not left:
                    yield chunk
                    chunk, left = [], self._schedule.chunk_bytes
        if chunk:
            yield chunk

    def wait(
        self, connection: Connection, window: BulkWindow, traffic: Traffic, num_bytes: int, stalled_s: float
    ) -> None:
        least, until_s = None, time.monotonic() + stalled_s
        while True:
            now_s = time.monotonic()
            with self._lock:
                wait_s = self._schedule.wait_s(traffic, num_bytes, now_s)
                bytes_per_s = self._schedule.bytes_per_s
            if not wait_s:
                under_way = connection.num_under_way()
                if under_way is None:
                    return
                trip = connection.round_trip_us()
                if trip is not None:
                    window.heard(*trip, now_s)
                if under_way <= window.num_bytes:
                    return
                if least is None or under_way < least:
                    least, until_s = under_way, now_s + stalled_s
                if now_s > until_s:
                    raise TimeoutError("nothing gets through")
                wait_s = (under_way - window.num_bytes) / bytes_per_s
            time.sleep(min(max(wait_s, _LOOK_S), _LONGEST_S))
