"""The channel between a child process and its supervisor: one end is inherited. It ends with either.

A message that does not fit is dropped by the sender: every message here is repeated, or replaced by the death of its
receiver.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from tripool.local_channel import LocalChannel
from tripool.messages import AnyMessage, decode, encode


class SupervisorChannel:
    def __init__(self, end: socket.socket) -> None:
        self._channel = LocalChannel(end)
        self.fileno, self.close = self._channel.fileno, self._channel.close
        self.ended = False
        """The other side is gone."""

    @classmethod
    def pair(cls) -> tuple[SupervisorChannel, socket.socket]:
        """The supervisor's channel, and the end that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fileno: int) -> SupervisorChannel:
        return cls(socket.socket(fileno=fileno))

    def send(self, message: AnyMessage) -> None:
        try:
            self._channel.send(encode(message))
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def receive(self) -> Iterator[AnyMessage]:
        """All that is there."""
        while not self.ended:
            try:
                data = self._channel.receive()
            except OSError:
                data = memoryview(b"")
            if data is None:
                return
            if not data:
                self.ended = True
                return
            try:
                yield decode(data)
            except msgspec.DecodeError:
                continue
