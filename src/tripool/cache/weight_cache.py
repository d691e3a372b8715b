"""Weight cache of one machine: a folder of weight images in shared memory, one per model and packing, within a quota.

A process that needs a model without an image writes the image while it loads the checkpoint; a second process waits for
it, up to a bound, and then maps it. Locks are file locks, which the kernel releases when a process ends.

| file | contents |
|---|---|
| `KEY.image` | complete; locked (shared) by every process that maps it |
| `KEY.lock` | locked (exclusive) by the process that writes the image |
| `KEY.unfinished` | being written, or left by a writer that died |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tripool.cache.private_folder import NotPrivate, make_private
from tripool.cache.weight_image import WeightImage, WeightImageDamaged, WeightImageWriter, open_weight_image
from tripool.errors import ArenaError

WAIT_S = 120.0
"""Longest wait for another process that writes the same image."""
_POLL_S = 0.01
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


@dataclass(slots=True)
class WeightCacheCounters:
    """Counts of this process."""

    hits: int = 0
    misses: int = 0
    written: int = 0
    damaged: int = 0
    """Found damaged, and replaced."""
    evicted: int = 0
    refused: int = 0
    """Loaded without an image: larger than the quota, memory full, or another writer too slow."""


class WeightCache:
    def __init__(
        self,
        folder: Path,
        quota_bytes: int,
        *,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            make_private(folder)
        except NotPrivate as error:  # another user may have created it: the name is predictable
            hint = "remove it, or serve without --keep-models"
            raise ArenaError(f"no folder for packed weights: {error.message}", hint=hint) from error
        self.folder, self.quota_bytes = folder, quota_bytes
        self._wait_s, self._clock, self._pause = wait_s, clock, pause
        self.counters = WeightCacheCounters()

    def find(self, key: str) -> WeightImage | None:
        """Map and verify an image. A damaged one is removed and counts as a miss."""
        path = self._path(key)
        try:
            image = open_weight_image(path, key)
        except WeightImageDamaged:
            self.discard(key)
            return None
        if image is not None:
            self.counters.hits += 1
            with contextlib.suppress(FileNotFoundError):  # removed by hand; it stays mapped
                os.utime(path)  # eviction is by time of last use
        return image

    def discard(self, key: str) -> None:
        """Remove an unusable image."""
        self.counters.damaged += 1
        self._path(key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self, key: str) -> Iterator[bool]:
        """Hold the lock of this key among all processes; the caller must look for the image again. False if it timed
        out.
        """
        lock = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield self._locked(lock)
        finally:
            os.close(lock)

    def writer(self, key: str, most_bytes: int | None = None) -> WeightImageWriter | None:
        """A writer for an image of at most `most_bytes`; None if there is no room. The caller must hold `exclusive`."""
        self.counters.misses += 1
        room_bytes = self.quota_bytes if most_bytes is None else min(self.quota_bytes, most_bytes)
        try:
            return WeightImageWriter(self.folder / f"{key}.unfinished", key, room_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.counters.refused += 1
            return None

    def make_room(self) -> bool:
        """Remove the least recently used image; False if all of them are in use."""
        return self._evict(lambda size: size > 0)

    def publish(self, key: str, writer: WeightImageWriter, facts: bytes) -> None:
        """Seal the image and evict older ones until all fit the quota. Images in use stay, even above the quota."""
        try:
            writer.seal(facts, self._path(key))
        except OSError as error:
            writer.abandon()  # placed tensors stay readable
            if error.errno not in (errno.ENOENT, *_FULL):  # the server may have removed the folder
                raise
            self.counters.refused += 1
            return
        self.counters.written += 1
        self._evict(lambda size: size > self.quota_bytes, keep=key, until_done=True)

    def sizes(self) -> dict[str, int]:
        """Bytes of each complete image, least recently used first."""
        return {path.stem: size for _, path, size in self._images()}

    def remove(self, key: str) -> bool:
        """Remove an image on request. False if it is in use or missing."""
        return self._remove(self._path(key))

    def _evict(self, too_much: Callable[[int], bool], *, keep: str = "", until_done: bool = False) -> bool:
        self._sweep()
        total = sum(size for _, _, size in self._images())
        removed = False
        for _, path, size in self._images():
            if not too_much(total):
                break
            if path.stem != keep and self._remove(path):
                self.counters.evicted += 1
                total, removed = total - size, True
                if not until_done:
                    break
        return removed

    def _remove(self, path: Path) -> bool:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            return False  # mapped by a process
        finally:
            os.close(file)

    def _sweep(self) -> None:
        """Remove unfinished files of dead writers."""
        for path in self.folder.glob("*.unfinished"):
            with open(path.with_suffix(".lock"), "a") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)

    def _images(self) -> list[tuple[int, Path, int]]:
        found = []
        for path in self.folder.glob("*.image"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, path, stat.st_size))
        return sorted(found)

    def _locked(self, lock: int) -> bool:
        deadline_s = self._clock() + self._wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock() >= deadline_s:
                    self.counters.refused += 1
                    return False
                self._pause(_POLL_S)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.image"
