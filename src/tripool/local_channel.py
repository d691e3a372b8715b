"""Ends of connections between two processes of this machine: messages that keep their order and their borders.

Unix sockets; a connection ends with either process. `LocalChannel` (SOCK_SEQPACKET) carries small messages and waits
for nothing but an answer, `StreamChannel` (SOCK_STREAM) messages of any size.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path
from queue import SimpleQueue

MAX_MESSAGE_BYTES = 2**18
_LOOK_S = 150e-6
"""Time spent polling for an answer before sleeping: a peer answers sooner than a sleeping process wakes up."""


class LocalChannel:
    """`received`: a buffer to share with channels that are read one after the other."""

    def __init__(self, end: socket.socket, received: memoryview | None = None) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        self._end = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        # Kept: a fresh buffer of this size for every message would cost more than the message.
        self._received = received or memoryview(bytearray(MAX_MESSAGE_BYTES))

    @classmethod
    def connect(cls, path: Path) -> LocalChannel | None:
        """None: nothing listens there, or its backlog is full."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.setblocking(False)
        try:
            end.connect(str(path))
        except OSError:
            end.close()
            return None
        return cls(end)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, data: bytes) -> None:
        """Raises BlockingIOError when the peer does not read, another OSError when it is gone."""
        self._end.send(data)

    @property
    def readable(self) -> bool:
        """Whether `receive` has something to say at once."""
        return bool(self._readable.poll(0))

    def receive(self, wait_s: float = 0.0) -> memoryview | None:
        """The next message, valid until the next call. None: nothing came in time. Empty: the peer closed its end."""
        try:
            num_bytes = self._wait(wait_s) if wait_s > 0 else self._end.recv_into(self._received)
        except BlockingIOError:
            return None
        return None if num_bytes is None else self._received[:num_bytes]

    def _wait(self, wait_s: float) -> int | None:
        # The message just sent may have woken the peer on this very core, where it waits until we yield.
        os.sched_yield()
        look_until_s = time.monotonic() + min(wait_s, _LOOK_S)
        while True:
            try:
                return self._end.recv_into(self._received)
            except BlockingIOError:
                if time.monotonic() >= look_until_s:
                    break
                os.sched_yield()
        return self._end.recv_into(self._received) if self._readable.poll(math.ceil(wait_s * 1e3)) else None

    def close(self) -> None:
        self._end.close()


_LENGTH = struct.Struct("<I")
_READ_BYTES, _SEND_BYTES = 2**16, 2**20


class StreamChannel:
    """`send` waits until the system has taken the message, `send_soon` for nothing. One thread receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        # As much as the system allows: a peer that pauses for some messages holds up nothing here.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self._end = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._received = bytearray()
        self._sending = threading.Lock()
        self._num_left = 0
        """Messages in `_left`, and the one that its thread sends."""
        self._left: SimpleQueue[bytes] = SimpleQueue()
        """What the system did not take at once."""

    @classmethod
    def pair(cls) -> tuple[StreamChannel, socket.socket]:
        """A channel, and the end that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, data: bytes) -> None:
        """Raises OSError when the peer is gone."""
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def send_soon(self, data: bytes) -> None:
        """From any thread. What the peer does not read yet waits here; a peer that is gone is noticed by `receive`."""
        data = _LENGTH.pack(len(data)) + data
        with self._sending:
            if not self._num_left:
                try:
                    num_sent = self._end.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    num_sent = 0
                except OSError:
                    return
                if num_sent == len(data):
                    return
                data = data[num_sent:]
                threading.Thread(target=self._send_left, name="tripool-channel", daemon=True).start()
            self._num_left += 1
            self._left.put(data)

    def _send_left(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._end.sendall(self._left.get())
            with self._sending:
                self._num_left -= 1
                if not self._num_left:
                    return

    def receive(self, wait_s: float | None = 0.0) -> list[bytes]:
        """What is there, in whole messages, after waiting so many seconds at most, or without end, for the first one.

        Raises ConnectionError when the peer is gone and nothing is left.
        """
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while not (messages := self._whole()):
            if wait_s != 0.0:
                left_s = until_s - time.monotonic()
                if not self._readable.poll(None if wait_s is None else max(0, math.ceil(left_s * 1e3))):
                    return []
            try:
                data = self._end.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            if not data:
                raise ConnectionResetError("the other process has closed its end")
            self._received += data
        return messages

    def _whole(self) -> list[bytes]:
        messages, at, received = [], 0, self._received
        while len(received) >= at + _LENGTH.size:
            start = at + _LENGTH.size
            end = start + _LENGTH.unpack_from(received, at)[0]
            if end > len(received):
                break
            messages.append(bytes(received[start:end]))
            at = end
        del received[:at]
        return messages

    def wait_closed(self) -> None:
        """Until the peer is gone, whatever it sends."""
        closed = select.poll()
        closed.register(self._end, 0)
        closed.poll()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes threads that send or receive
        self._end.close()
