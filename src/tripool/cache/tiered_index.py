"""Both tiers as one: blocks that only the disk has come back to memory when someone asks for them. Pure.

A look-up that meets such blocks may wait for them, as long as its asker allows. They get slots like any other block
that is written, are read there by whoever runs this (`take_reads`), and are committed; then, or when the time is over,
the look-up is answered with the longest prefix that memory has by then. What comes too late is there for the next one.

Memory is asked first and answers at once: a hit there never waits for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from tripool.cache.disk_records import DiskCopy, Purge, Segment, Write
from tripool.cache.disk_tier import DiskTier
from tripool.cache.index import PoolIndex
from tripool.cache.records import Hit, Record, Written
from tripool.messages import WorkerId

_GROUP_BLOCKS = 8
"""Committed together: a look-up whose time is over gets what is there, in such steps."""
_MOST_READING = 256
_MOST_WAITING = 256


@dataclass(frozen=True, slots=True)
class Read:
    """Bring this copy into a slot. `ticket` is the reservation that the slot is of."""

    ticket: int
    slot: int
    copy: DiskCopy


@dataclass(slots=True)
class _Group:
    """Blocks that are being read, under one reservation."""

    namespace: bytes
    keys: list[bytes]
    num_open: int
    written: list[Written] = field(default_factory=list)
    is_void: bool = False
    """Purged meanwhile."""


@dataclass(slots=True)
class _Waiting:
    keys: Sequence[bytes]
    reader: WorkerId
    namespace: bytes
    deadline_s: float
    lease: int
    """Of the blocks that memory has already, so that they are still there in the end."""
    coming: set[bytes]
    called: frozenset[bytes]
    """What was on its way when it began to wait."""


class TieredIndex:
    """An index and, once `open_disk` was called, a disk behind it. `own` writes what is read; it is this member."""

    def __init__(self, index: PoolIndex, own: WorkerId) -> None:
        self.index = index
        self.disk: DiskTier | None = None
        self._own = own
        self._quotas: dict[bytes, int] = {}
        self._reads: list[Read] = []
        self._groups: dict[int, _Group] = {}
        self._coming: dict[bytes, bytes] = {}
        """Keys on their way to memory, and whose they are."""
        self._waiting: dict[int, _Waiting] = {}
        self._num_waited = 0

    # ---- the disk comes and goes --------------------------------------------------------------------------------

    def open_disk(self, disk: DiskTier, segments: Sequence[Segment], purges: Sequence[Purge]) -> None:
        """From now on. `segments` and `purges` are what was found on it."""
        self.disk = disk
        self.set_quotas(self._quotas)
        disk.see(enumerate(self.index.records))
        disk.restore(segments, purges)

    def close_disk(self) -> None:
        """It can be neither read nor written any more, and memory goes on. What is under way is answered as ever."""
        self.disk = None
        reads, self._reads = self._reads, []
        for read in reads:
            self.was_read(read, None)

    # ---- reading ------------------------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[bytes], reader: WorkerId, namespace: bytes, now_s: float, wait_s: float = 0.0
    ) -> Hit | int:
        """What memory has; or the number under which `answers` will tell it, after `wait_s` at most."""
        hit = self.index.lookup(keys, reader, namespace, now_s)
        num_here = len(hit.blocks)
        if self.disk is None or num_here == len(keys):
            return hit
        coming = self._call(keys[num_here:], namespace, now_s)
        if not coming or wait_s <= 0 or len(self._waiting) >= _MOST_WAITING:
            return hit
        self.index.uncount(hit, len(keys))  # it is asked again when they are here
        self._num_waited += 1
        deadline_s = now_s + wait_s
        waiting = _Waiting(keys, reader, namespace, deadline_s, hit.lease, coming, frozenset(coming))
        self._waiting[self._num_waited] = waiting
        return self._num_waited

    def answers(self, now_s: float) -> list[tuple[int, Hit]]:
        """Look-ups that waited: for nothing any more, or until their time was over."""
        ready = [n for n, each in self._waiting.items() if not each.coming or now_s >= each.deadline_s]
        found: list[tuple[int, Hit]] = []
        for number in ready:
            each = self._waiting.pop(number)
            hit = self.index.lookup(each.keys, each.reader, each.namespace, now_s)
            told = zip(hit.blocks, each.keys, strict=False)
            blocks = tuple(block._replace(from_disk=key in each.called) for block, key in told)
            found.append((number, replace(hit, blocks=blocks)))
            self.index.release(each.lease, each.reader)
        return found

    def give_up(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        each = self._waiting.pop(number, None)
        if each is not None:
            self.index.release(each.lease, each.reader)

    def _call(self, keys: Sequence[bytes], namespace: bytes, now_s: float) -> set[bytes]:
        """Begin to bring the leading ones of these keys from disk; returns those that are on their way."""
        assert self.disk is not None
        leading: list[bytes] = []
        disk_copies: list[DiskCopy] = []
        for key in keys:
            if self._coming.get(key) != namespace:
                copy = self.disk.find(key, namespace)
                if copy is None or key in self._coming or len(self._coming) + len(disk_copies) >= _MOST_READING:
                    break
                disk_copies.append(copy)
            leading.append(key)
        for start in range(0, len(disk_copies), _GROUP_BLOCKS):
            self._read(disk_copies[start : start + _GROUP_BLOCKS], namespace, now_s)
        return set(takewhile(self._coming.__contains__, leading))  # as far as there was room for them

    def _read(self, disk_copies: Sequence[DiskCopy], namespace: bytes, now_s: float) -> None:
        keys, depths = [copy.key for copy in disk_copies], [copy.position for copy in disk_copies]
        grant = self.index.reserve(keys, self._own, namespace, now_s, depths)
        if grant.ticket:
            wanted = [disk_copies[position] for position in grant.positions]
            self._groups[grant.ticket] = _Group(namespace, [copy.key for copy in wanted], len(wanted))
            self._coming |= {copy.key: namespace for copy in wanted}
            self._reads += [Read(grant.ticket, slot, copy) for slot, copy in zip(grant.slots, wanted, strict=True)]

    # ---- what the disk is to do, and has done -------------------------------------------------------------------

    def take_changes(self) -> list[tuple[int, Record]]:
        """As the index's own: what the arena's headers must say before anyone is answered."""
        changes = self.index.take_changes()
        if self.disk is not None and changes:
            self.disk.see(changes)
        return changes

    def take_reads(self) -> list[Read]:
        """Each must be answered by `was_read`. Until then nobody but who does it writes into the slot."""
        reads, self._reads = self._reads, []
        return reads

    def was_read(self, read: Read, checksum: int | None) -> None:
        """`checksum` is that of what stands in the slot now; None: nothing could be read."""
        intact = checksum == read.copy.checksum
        if self.disk is not None and checksum is not None:
            self.disk.was_read(read.copy, intact)
        group = self._groups[read.ticket]
        group.num_open -= 1
        if intact:
            group.written.append(Written(read.slot, read.copy.checksum, read.copy.num_bytes, read.copy.form))
        if group.num_open:
            return
        del self._groups[read.ticket]
        self.index.commit(read.ticket, self._own, () if group.is_void else group.written)
        for key in group.keys:
            del self._coming[key]
            for each in self._waiting.values():
                each.coming.discard(key)

    def take_writes(self, now_s: float) -> list[Write]:
        """Each must be answered by `wrote`."""
        return self.disk.next_writes(now_s) if self.disk is not None else []

    def wrote(self, write: Write, done: bool) -> None:
        if self.disk is not None:
            (self.disk.written if done else self.disk.failed)(write.copy.number)

    @property
    def next_deadline_s(self) -> float | None:
        """When something is to be done, if nothing happens before."""
        times = [self.index.next_deadline_s, self.disk.next_write_s if self.disk is not None else None]
        times += [each.deadline_s for each in self._waiting.values()]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ---- tenants ------------------------------------------------------------------------------------------------

    def purge(self, namespace: bytes) -> tuple[int, Purge | None]:
        """Forget a namespace in both tiers; how many blocks went, and what the disk must be told of it."""
        for group in self._groups.values():
            group.is_void = group.is_void or group.namespace == namespace
        num_on_disk, purge = self.disk.purge(namespace) if self.disk is not None else (0, None)
        return num_on_disk + self.index.purge(namespace), purge

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        """Slots by namespace; of the disk, each may have the same share. Returns how many blocks memory forgot."""
        self._quotas = dict(quotas)
        if self.disk is not None:
            unit = self.disk.capacity_bytes / self.index.num_slots
            self.disk.set_quotas({namespace: int(slots * unit) for namespace, slots in quotas.items()})
        return self.index.set_quotas(quotas)

    def check(self) -> None:
        self.index.check()
        if self.disk is not None:
            self.disk.check()
        coming = {key: group.namespace for group in self._groups.values() for key in group.keys}
        assert coming == self._coming, "a block comes from nowhere"
        assert all(each.coming <= coming.keys() for each in self._waiting.values()), "waits for what does not come"
        for ticket in self._groups:
            assert self.index.writer_of(ticket) == self._own, f"reads into slots that are not reserved ({ticket})"
