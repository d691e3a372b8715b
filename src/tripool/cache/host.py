"""What the cache pool needs of its machine: connections between clients and members, arenas in shared memory, a clock.

`LocalHost` is the implementation that serves. The fault simulation hands in another one, in virtual time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from tripool.cache import wire
from tripool.cache.arena import Arena
from tripool.local_channel import LocalChannel


class MemberChannel(Protocol):
    """A client's connection to one member. Messages keep their order and their borders."""

    def send(self, data: bytes) -> None:
        """Raises BlockingIOError when the member does not read, another OSError when the connection is gone."""

    def receive(self, wait_s: float) -> memoryview | bytes | None:
        """The next message, valid until the next call. None: nothing came in time. Empty: the member closed."""

    @property
    def readable(self) -> bool:
        """Whether `receive` has something to say at once."""

    def close(self) -> None: ...


class CacheHost(Protocol):
    def now_s(self) -> float: ...

    def connect(self, member: str) -> MemberChannel | None:
        """None: the member is not there."""

    def create_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena: ...

    def reopen_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena | None:
        """The member's arena from its previous run. None: there is none of this shape."""

    def attach_arena(self, name: str) -> Arena:
        """A client's map of a member's arena. Raises OSError or ArenaError."""


class LocalHost:
    """Unix sockets and memory-mapped files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    now_s = staticmethod(time.monotonic)

    def connect(self, member: str) -> MemberChannel | None:
        return LocalChannel.connect(wire.address(self._folder, member))

    def create_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena:
        return Arena.create(self._folder / name, slot_bytes, num_slots)

    def reopen_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena | None:
        return Arena.reopen(self._folder / name, slot_bytes, num_slots)

    def attach_arena(self, name: str) -> Arena:
        return Arena.attach(self._folder / name)
