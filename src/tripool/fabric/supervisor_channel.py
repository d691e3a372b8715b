"""The channel between a child process and its supervisor: a socket pair, one end inherited. It ends with either.

Messages keep their borders. Nobody ever waits: what does not fit is dropped by the sender, and every message here is
either said again or replaced by the death of its receiver.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from tripool.messages import AnyMessage, decode, encode

_MAX_BYTES = 2**16


class SupervisorChannel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)
        self.ended = False
        """The other side is gone."""

    @classmethod
    def pair(cls) -> tuple[SupervisorChannel, socket.socket]:
        """The supervisor's leash, and the end that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fileno: int) -> SupervisorChannel:
        return cls(socket.socket(fileno=fileno))

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: AnyMessage) -> None:
        try:
            self._end.send(encode(message))
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def receive(self) -> Iterator[AnyMessage]:
        """All that is there."""
        while not self.ended:
            try:
                data = self._end.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return
            try:
                yield decode(data)
            except msgspec.DecodeError:
                continue

    def close(self) -> None:
        self._end.close()
