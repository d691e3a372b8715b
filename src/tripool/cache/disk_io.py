"""Disk reads and writes of a cache member, in two threads beside the member's loop: one writes, one reads.

The loop never touches the disk. It takes decisions from `TieredIndex`, queues them, and is woken through a file
descriptor when one is done. The tiers limit how much is in flight, so the queues are bounded.

Any disk error (full, read-only, deleted, broken, in use) switches the disk tier off and logs the reason once. Memory is
not affected: a pending read becomes a miss, a pending write is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tripool.cache.arena import Arena
from tripool.cache.disk_records import PAGE, DiskCopy, Purge, Write, footprint
from tripool.cache.disk_store import DiskStore, explain
from tripool.cache.disk_tier import DiskTier
from tripool.cache.lanes import Lanes
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.config import DiskConfig
from tripool.errors import DiskError

_LOG = logging.getLogger("tripool.cache")
_MOST_SEGMENTS = 64
_SEGMENT_BLOCKS = 4


def geometry(num_bytes: int, block_bytes: int) -> tuple[int, int]:
    """(number of segments, bytes per segment): some dozens, each with room for a few of the largest blocks."""
    least = PAGE + _SEGMENT_BLOCKS * footprint(block_bytes)
    segment_bytes = max(num_bytes // _MOST_SEGMENTS // PAGE * PAGE, least)
    num_segments = num_bytes // segment_bytes
    if num_segments < 2:
        need = 2 * least / 2**30
        raise DiskError(f"{num_bytes / 2**30:.3g} GB of disk hold no blocks", hint=f"at least {need:.2g} GB")
    return num_segments, segment_bytes


class DiskTasks(Protocol):
    """A member's disk tier, called in the member's loop."""

    state: str
    """opening, on, or why it is off."""
    tier: DiskTier | None
    """None unless it is on."""

    def fileno(self) -> int: ...

    def poll(self, now_s: float) -> None: ...

    def purge(self, namespace: bytes, then: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


OpenDisk = Callable[[str, DiskConfig, TieredIndex, Arena, float], DiskTasks]
"""Signature of the constructor of `DiskIo`."""


class DiskIo:
    def __init__(
        self, name: str, config: DiskConfig, tiered_index: TieredIndex, arena: Arena, namespace_share: float
    ) -> None:
        self._name, self._config, self._tiered_index, self._arena = name, config, tiered_index, arena
        self._namespace_share = namespace_share
        self._folder = Path(config.folder) / name
        self.state = "opening"
        """"opening", "on", or "off: " and the reason."""
        self.tier: DiskTier | None = None
        self._store: DiskStore | None = None
        self._purges: list[tuple[bytes, Callable[[], None]]] = []
        """Purges requested before the disk was open."""
        self._lanes = Lanes("disk")
        self._lanes.writer.put(self._open)

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._lanes.fileno()

    def poll(self, now_s: float) -> None:
        """Called in the member's loop: take finished jobs and queue the next ones."""
        self._lanes.settle()
        if self.tier is None:
            return
        for read in self._tiered_index.take_reads(self.tier):
            self._lanes.reader.put(partial(self._read, read))
        writes = self.tier.next_writes(now_s)
        if writes:
            self._lanes.writer.put(partial(self._write, self.tier, writes))

    def purge(self, namespace: bytes, then: Callable[[], None]) -> None:
        """Make a purge durable, after the tier itself. `then` is called once it is, and never if that fails."""
        if self.state == "opening":
            self._purges.append((namespace, then))
        elif self.tier is not None:
            self._lanes.writer.put(partial(self._write_purges, self.tier.take_purges(), then), first=True)
        elif self._store is not None:  # the tier is off: delete the whole store, other namespaces included
            self._lanes.writer.put(partial(self._remove, then), first=True)

    def close(self) -> None:
        if self._lanes.close() and self._store is not None:  # if the disk hangs, its threads still use it
            self._store.close()

    # ---- in the threads -----------------------------------------------------------------------------------------

    def _open(self) -> Callable[[], None]:
        config, block_bytes = self._config, self._arena.slot_bytes
        try:
            num_segments, segment_bytes = geometry(config.num_bytes, block_bytes)
            store, segments, purges = DiskStore.open(
                self._folder,
                bytes.fromhex(config.fingerprint),
                num_segments=num_segments,
                segment_bytes=segment_bytes,
                block_bytes=block_bytes,
            )
        except DiskError as error:
            return partial(self._off, error)
        capacity = num_segments * (segment_bytes - PAGE)
        share = int(self._namespace_share * capacity) if self._namespace_share < 1 else None
        tier = DiskTier(num_segments, segment_bytes, bytes_per_s=config.write_bytes_per_s, namespace_bytes=share)
        tier.restore(segments, purges)
        return partial(self._opened, store, tier)

    def _write(self, tier: DiskTier, writes: Sequence[Write]) -> Callable[[], None]:
        assert self._store is not None
        try:
            done = self._store.write(writes, self._arena.read)
        except (OSError, DiskError) as error:
            return partial(self._off, self._explained(error))
        return partial(_wrote, tier, writes, done)

    def _read(self, read: Read[DiskCopy]) -> Callable[[], None]:
        assert self._store is not None
        try:
            checksum = self._store.read(read.copy, partial(self._arena.write, read.slot))
        except (OSError, DiskError) as error:
            return partial(self._not_read, read, self._explained(error))
        return partial(self._tiered_index.was_read, read, checksum)

    def _write_purges(self, purges: Sequence[Purge], then: Callable[[], None]) -> Callable[[], None]:
        assert self._store is not None
        try:
            for purge in purges:
                self._store.purge(purge)
        except (OSError, DiskError) as error:
            return partial(self._not_purged, self._explained(error), self._remove(then))
        return then

    def _remove(self, then: Callable[[], None]) -> Callable[[], None]:
        assert self._store is not None
        try:
            self._store.remove()
        except OSError:
            return lambda: None  # no reply: the caller has to repeat the purge
        return then

    def _explained(self, error: OSError | DiskError) -> DiskError:
        return error if isinstance(error, DiskError) else explain(error, self._folder, self._config.num_bytes)

    # ---- in the loop --------------------------------------------------------------------------------------------

    def _opened(self, store: DiskStore, tier: DiskTier) -> None:
        self._store, self.tier, self.state = store, tier, "on"
        _LOG.info("the disk tier is on", extra={"folder": str(self._folder), "bytes": self._config.num_bytes})
        self._tiered_index.add_tier(tier)
        requested, self._purges = self._purges, []
        for namespace, then in requested:
            tier.purge(namespace)
            self.purge(namespace, then)

    def _not_read(self, read: Read[DiskCopy], error: DiskError) -> None:
        self._off(error)
        self._tiered_index.was_read(read, None)

    def _not_purged(self, error: DiskError, removed: Callable[[], None]) -> None:
        self._off(error)
        removed()

    def _off(self, error: DiskError) -> None:
        if self.state not in ("opening", "on"):
            return
        self.state = f"off: {error}"
        if self.tier is not None:
            self._tiered_index.remove_tier(self.tier)
            self.tier = None
        requested, self._purges = self._purges, []
        for namespace, then in requested:
            self.purge(namespace, then)
        _LOG.warning("the disk tier is off; memory goes on", extra={"error": error.code, "reason": str(error)})


def _wrote(tier: DiskTier, writes: Sequence[Write], done: Sequence[bool]) -> None:
    for write, each in zip(writes, done, strict=True):
        (tier.written if each else tier.failed)(write.copy.number)
