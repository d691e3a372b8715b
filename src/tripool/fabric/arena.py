"""Memory that two processes see: a file under the shared-memory file system, mapped by both.

Not `multiprocessing.shared_memory`: its tracker removes a segment when any one process that knew it dies.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from xxhash import xxh3_64_intdigest


class Arena:
    """The owner's side: slots of equal size. Only touched slots take memory, and whether there is any is asked first:
    a page that the file system cannot give would end the process."""

    def __init__(self, path: Path, slot_bytes: int, num_slots: int) -> None:
        assert slot_bytes > 0 and num_slots > 0
        self.path, self.slot_bytes, self.num_slots = path, slot_bytes, num_slots
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, slot_bytes * num_slots)
        self._map = mmap.mmap(self._file, slot_bytes * num_slots)
        self._num_backed = 0
        """Leading slots that have memory."""

    def back(self, slot: int) -> bool:
        """Make sure that there is memory behind a slot; False when the shared memory is full."""
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
        """The slot's bytes. Let go of it before `close`."""
        start = slot * self.slot_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def checksum(data: memoryview | bytearray | bytes) -> int:
    return xxh3_64_intdigest(data)
