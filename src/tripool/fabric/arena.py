"""Memory for KV transfers: slots that a sender writes and receivers map, in files of the shared-memory file system.

Not `multiprocessing.shared_memory`: its tracker removes a segment when any one process that knew it dies.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64_intdigest


class SlotMemory(Protocol):
    """The sender's memory: slots of equal size under a name that receivers know."""

    @property
    def name(self) -> str: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    def back(self, slot: int) -> bool:
        """Make sure that there is memory behind a slot; False when the shared memory is full."""
        ...

    def view(self, slot: int) -> memoryview:
        """The slot's bytes. Release it before `close`."""
        ...

    def close(self) -> None: ...


class MappedMemory(Protocol):
    """The receiver's maps of senders' memory, by name."""

    def view(self, name: str, start: int, num_bytes: int) -> memoryview | None:
        """None: there is no such memory, or not so much of it."""
        ...

    def close(self) -> None: ...


class Arena:
    """`SlotMemory` in a file. Only touched slots take memory, and it is reserved first: a page that the file system
    cannot give would end the process."""

    def __init__(self, path: Path, slot_bytes: int, num_slots: int) -> None:
        assert slot_bytes > 0 and num_slots > 0
        self.path, self.slot_bytes, self.num_slots = path, slot_bytes, num_slots
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, slot_bytes * num_slots)
        self._map = mmap.mmap(self._file, slot_bytes * num_slots)
        self._num_backed = 0
        """Leading slots that have memory."""

    @property
    def name(self) -> str:
        return self.path.name

    def back(self, slot: int) -> bool:
        while self._num_backed <= slot:
            try:
                os.posix_fallocate(self._file, self._num_backed * self.slot_bytes, self.slot_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                return False
            self._num_backed += 1
        return True

    def view(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


class FileMaps:
    """`MappedMemory` of the files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, name: str, start: int, num_bytes: int) -> memoryview | None:
        mapped = self._map(name)
        if mapped is None or not 0 <= start <= len(mapped) - num_bytes:
            return None
        return memoryview(mapped)[start : start + num_bytes]

    def _map(self, name: str) -> mmap.mmap | None:
        if name not in self._maps:
            self._forget_removed()
            if name != Path(name).name or "\0" in name:
                return None  # a name, never a path: it came from outside
            try:
                file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                return None  # its owner is gone, and with it the KV
            try:
                self._maps[name] = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                return None  # a folder, or an empty file
            finally:
                os.close(file)
        return self._maps[name]

    def _forget_removed(self) -> None:
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            self._maps.pop(name).close()

    def close(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()


def checksum(data: memoryview | bytearray | bytes) -> int:
    return xxh3_64_intdigest(data)
