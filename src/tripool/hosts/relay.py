"""Carries bytes between a local socket and a connection to another host, both ways, until either ends."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable

from tripool.hosts.connection import Connection

_BUFFER_BYTES = 2**18
_LOOK_MS = 1000


def relay(local: socket.socket, remote: Connection) -> None:
    """One thread for both directions: an encrypted connection is not for two at once. Neither direction waits for the
    other: what one side does not take is kept here, within bounds, and no more is read for it."""
    local.setblocking(False)
    remote.unblock()
    to_remote, to_local = _Way(), _Way()
    while not (to_remote.over or to_local.over):
        if not (remote.pending and not to_local.waiting):
            ready = select.poll()  # unlike select, for any number of connections
            for end, leaving, arriving in ((local, to_remote, to_local), (remote, to_local, to_remote)):
                wanted = (0 if leaving.waiting else select.POLLIN) | (select.POLLOUT if arriving.waiting else 0)
                if wanted:
                    ready.register(end, wanted)
            ready.poll(_LOOK_MS)
        to_remote.carry(local.recv_into, remote.write_some)
        to_local.carry(remote.read_some, local.send)
    local.close()
    remote.close()


class _Way:
    """One direction."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.waiting = self._buffer[:0]
        self.over = False

    def carry(self, read: Callable[[memoryview], int], write: Callable[[memoryview], int]) -> None:
        try:
            if not self.waiting:
                count = read(self._buffer)
                self.over = not count
                self.waiting = self._buffer[:count]
            while self.waiting:
                self.waiting = self.waiting[write(self.waiting) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self.over = True
