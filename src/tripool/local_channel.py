"""One end of a connection between two processes of this machine: datagrams that keep their order and their borders.

A unix socket of type SOCK_SEQPACKET. It ends with either process, and nothing is ever waited for but an answer.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from pathlib import Path

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
