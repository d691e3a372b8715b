"""Memory and the tiers behind it as one index: blocks are read back into memory when a look-up needs them. Pure.

A look-up that finds such blocks may wait for them, as long as the caller allows. They get reserved slots like any
written block, are read there by the caller of `take_reads`, and are committed. Then, or at its deadline, the look-up is
answered with the longest prefix that is in memory. Blocks that arrive later serve the next look-up.

Memory is searched first: a hit there never waits for a slower tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Generic

from tripool.cache.index import PoolIndex
from tripool.cache.records import Hit, Record, StoredBlock, Written
from tripool.cache.tier import BackingTier, BlockT, CacheTier
from tripool.messages import WorkerId

_GROUP_BLOCKS = 8
"""Blocks committed together: at its deadline, a look-up gets what has arrived in such groups."""
_MOST_READING = 256
_MOST_WAITING = 256


@dataclass(frozen=True, slots=True)
class Read(Generic[BlockT]):
    """Read this copy of a tier into a slot. `ticket` is the slot's reservation."""

    ticket: int
    slot: int
    copy: BlockT
    tier: BackingTier[BlockT]


@dataclass(slots=True)
class _Group:
    """Blocks being read under one reservation."""

    namespace: bytes
    keys: list[bytes]
    num_open: int
    written: list[Written] = field(default_factory=list)
    is_void: bool = False
    """Its namespace was purged meanwhile."""


@dataclass(slots=True)
class _Waiting:
    keys: Sequence[bytes]
    reader: WorkerId
    namespace: bytes
    deadline_s: float
    lease: int
    """Lease on the blocks that are in memory already, so that they are still there in the end."""
    arriving: set[bytes]
    requested: frozenset[bytes]
    """Blocks that were being read when it began to wait."""


class TieredIndex:
    """An index of memory, and tiers behind it, fastest first. `own` is this member, the writer of what is read back."""

    def __init__(self, index: PoolIndex, own: WorkerId) -> None:
        self.index = index
        self._backing: list[BackingTier[Any]] = []
        self._own = own
        self._quotas: dict[bytes, int] = {}
        self._reads: list[Read[Any]] = []
        self._groups: dict[int, _Group] = {}
        self._arriving: dict[bytes, bytes] = {}
        """Keys being read from a backing tier, and their namespaces."""
        self._waiting: dict[int, _Waiting] = {}
        self._num_waited = 0

    @property
    def tiers(self) -> list[CacheTier]:
        return [self.index, *self._backing]

    def add_tier(self, tier: BackingTier[Any]) -> None:
        self._backing.append(tier)
        self.set_quotas(self._quotas)
        tier.see(enumerate(self.index.records))

    def remove_tier(self, tier: BackingTier[Any]) -> None:
        """Reads in flight are answered as usual."""
        self._backing.remove(tier)
        for read in self.take_reads(tier):
            self.was_read(read, None)

    # ---- reading ------------------------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[bytes], reader: WorkerId, namespace: bytes, now_s: float, wait_s: float = 0.0
    ) -> Hit | int:
        """A hit in memory; or a number under which `answers` will return the hit, after at most `wait_s`."""
        hit = self.index.lookup(keys, reader, namespace, now_s)
        num_here = len(hit.blocks)
        if not self._backing or num_here == len(keys):
            return hit
        arriving = self._start_reads(keys[num_here:], namespace, now_s)
        if not arriving or wait_s <= 0 or len(self._waiting) >= _MOST_WAITING:
            return hit
        self.index.uncount(hit, len(keys))  # it is looked up again when they have arrived
        self._num_waited += 1
        deadline_s = now_s + wait_s
        waiting = _Waiting(keys, reader, namespace, deadline_s, hit.lease, arriving, frozenset(arriving))
        self._waiting[self._num_waited] = waiting
        return self._num_waited

    def answers(self, now_s: float) -> list[tuple[int, Hit]]:
        """Waiting look-ups that are complete or have reached their deadline."""
        ready = [n for n, each in self._waiting.items() if not each.arriving or now_s >= each.deadline_s]
        found: list[tuple[int, Hit]] = []
        for number in ready:
            each = self._waiting.pop(number)
            hit = self.index.lookup(each.keys, each.reader, each.namespace, now_s)
            found_keys = zip(hit.blocks, each.keys, strict=False)
            blocks = tuple(block._replace(from_disk=key in each.requested) for block, key in found_keys)
            found.append((number, replace(hit, blocks=blocks)))
            self.index.release(each.lease, each.reader)
        return found

    def give_up(self, number: int) -> None:
        """Cancel a waiting look-up."""
        each = self._waiting.pop(number, None)
        if each is not None:
            self.index.release(each.lease, each.reader)

    def _start_reads(self, keys: Sequence[bytes], namespace: bytes, now_s: float) -> set[bytes]:
        """Start reading the leading keys from backing tiers; returns those that are being read."""
        leading: list[bytes] = []
        copies: list[tuple[StoredBlock, BackingTier[Any]]] = []
        for key in keys:
            if self._arriving.get(key) != namespace:
                found = self._find(key, namespace)
                if found is None or key in self._arriving or len(self._arriving) + len(copies) >= _MOST_READING:
                    break
                copies.append(found)
            leading.append(key)
        for start in range(0, len(copies), _GROUP_BLOCKS):
            self._read(copies[start : start + _GROUP_BLOCKS], namespace, now_s)
        return set(takewhile(self._arriving.__contains__, leading))  # as far as there were slots for them

    def _find(self, key: bytes, namespace: bytes) -> tuple[StoredBlock, BackingTier[Any]] | None:
        for tier in self._backing:
            if (copy := tier.find(key, namespace)) is not None:
                return copy, tier
        return None

    def _read(self, copies: Sequence[tuple[StoredBlock, BackingTier[Any]]], namespace: bytes, now_s: float) -> None:
        keys, depths = [copy.key for copy, _ in copies], [copy.position for copy, _ in copies]
        grant = self.index.reserve(keys, self._own, namespace, now_s, depths)
        if grant.ticket:
            wanted = [copies[position] for position in grant.positions]
            self._groups[grant.ticket] = _Group(namespace, [copy.key for copy, _ in wanted], len(wanted))
            self._arriving |= {copy.key: namespace for copy, _ in wanted}
            self._reads += [Read(grant.ticket, slot, *each) for slot, each in zip(grant.slots, wanted, strict=True)]

    # ---- changes and reads ----------------------------------------------------------------------------------

    def take_changes(self) -> list[tuple[int, Record]]:
        """Slots changed since the last call, as `PoolIndex.take_changes`."""
        changes = self.index.take_changes()
        if changes:
            for tier in self._backing:
                tier.see(changes)
        return changes

    def take_reads(self, tier: BackingTier[BlockT]) -> list[Read[BlockT]]:
        """Reads to start. Each must be answered by `was_read`; until then nothing else writes into its slot."""
        reads = [read for read in self._reads if read.tier is tier]
        self._reads = [read for read in self._reads if read.tier is not tier]
        return reads

    def was_read(self, read: Read[Any], checksum: int | None) -> None:
        """Result of a read: `checksum` of what is in the slot now; None if nothing could be read."""
        intact = checksum == read.copy.checksum
        if read.tier in self._backing and checksum is not None:
            read.tier.was_read(read.copy, intact)
        group = self._groups[read.ticket]
        group.num_open -= 1
        if intact:
            group.written.append(Written(read.slot, read.copy.checksum, read.copy.num_bytes, read.copy.form))
        if group.num_open:
            return
        del self._groups[read.ticket]
        self.index.commit(read.ticket, self._own, () if group.is_void else group.written)
        for key in group.keys:
            del self._arriving[key]
            for each in self._waiting.values():
                each.arriving.discard(key)

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the next deadline, if nothing else happens."""
        times = [tier.next_deadline_s for tier in self.tiers]
        times += [each.deadline_s for each in self._waiting.values()]
        return min((time_s for time_s in times if time_s is not None), default=None)

    # ---- tenants ------------------------------------------------------------------------------------------------

    def purge(self, namespace: bytes) -> int:
        """Evict a namespace from all tiers; returns the number of blocks."""
        for group in self._groups.values():
            group.is_void = group.is_void or group.namespace == namespace
        return sum(tier.purge(namespace) for tier in reversed(self.tiers))

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        """Set quotas in slots of memory by namespace; in other tiers each gets the same share. Returns the number of
        evicted blocks.
        """
        self._quotas = dict(quotas)
        units = [(tier, tier.capacity / self.index.capacity) for tier in self.tiers]
        return sum(
            tier.set_quotas({namespace: int(slots * unit) for namespace, slots in quotas.items()})
            for tier, unit in units
        )

    def check(self) -> None:
        for tier in self.tiers:
            tier.check()
        arriving = {key: group.namespace for group in self._groups.values() for key in group.keys}
        assert arriving == self._arriving, "a block arrives without a read"
        assert all(each.arriving <= arriving.keys() for each in self._waiting.values()), (
            "waits for a block that is not being read"
        )
        for ticket in self._groups:
            assert self.index.writer_of(ticket) == self._own, f"reads into slots that are not reserved ({ticket})"
