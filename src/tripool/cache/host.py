"""What the cache pool needs of its machine: connections between clients and members, arenas in shared memory, a clock.

`LocalHost` is the implementation that serves. The fault simulation hands in another one, in virtual time.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from pathlib import Path
from typing import Protocol

from tripool.cache import wire
from tripool.cache.arena import Arena

_LOOK_S = 150e-6
"""Time spent polling for an answer before sleeping: members answer sooner than a sleeping client wakes up."""


class MemberChannel(Protocol):
    """A client's connection to one member. Messages keep their order and their borders."""

    def send(self, data: bytes) -> None:
        """Raises BlockingIOError when the member does not read, another OSError when the connection is gone."""
        ...

    def receive(self, wait_s: float) -> memoryview | bytes | None:
        """The next message, valid until the next call. None: nothing came in time. Empty: the member closed."""
        ...

    @property
    def readable(self) -> bool:
        """Whether `receive` has something to say at once."""
        ...

    def close(self) -> None: ...


class CacheHost(Protocol):
    def now_s(self) -> float: ...

    def connect(self, member: str) -> MemberChannel | None:
        """None: the member is not there."""
        ...

    def create_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena: ...

    def reopen_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena | None:
        """The member's arena from its previous run. None: there is none of this shape."""
        ...

    def attach_arena(self, name: str) -> Arena:
        """A client's map of a member's arena. Raises OSError or ArenaError."""
        ...


class LocalHost:
    """Unix sockets and memory-mapped files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    now_s = staticmethod(time.monotonic)

    def connect(self, member: str) -> MemberChannel | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.setblocking(False)
        try:
            end.connect(str(wire.address(self._folder, member)))
        except OSError:  # no listener, or its backlog is full
            end.close()
            return None
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wire.MAX_MESSAGE_BYTES)
        return _SocketChannel(end)

    def create_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena:
        return Arena.create(self._folder / name, slot_bytes, num_slots)

    def reopen_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena | None:
        return Arena.reopen(self._folder / name, slot_bytes, num_slots)

    def attach_arena(self, name: str) -> Arena:
        return Arena.attach(self._folder / name)


class _SocketChannel:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        # Kept: a fresh buffer of this size for every message would cost more than the message.
        self._received = memoryview(bytearray(wire.MAX_MESSAGE_BYTES))

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    @property
    def readable(self) -> bool:
        return bool(self._readable.poll(0))

    def receive(self, wait_s: float) -> memoryview | None:
        num_bytes = self._receive(wait_s)
        return None if num_bytes is None else self._received[:num_bytes]

    def _receive(self, wait_s: float) -> int | None:
        if wait_s > 0:
            # The message just sent may have woken the member on this very core, where it waits until we yield.
            os.sched_yield()
        look_until_s = time.monotonic() + min(wait_s, _LOOK_S)
        while True:
            try:
                return self._socket.recv_into(self._received)
            except BlockingIOError:
                if time.monotonic() >= look_until_s:
                    break
                os.sched_yield()
        return self._socket.recv_into(self._received) if self._readable.poll(math.ceil(wait_s * 1e3)) else None

    def close(self) -> None:
        self._socket.close()
