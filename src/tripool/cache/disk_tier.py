"""Policy of the disk tier: which blocks have a copy on disk, where the next copy goes and which copies it evicts. Pure.

Uses keys, sizes and offsets, never bytes or files: those are in `cache.disk_store`.

Every block that is committed in memory is written to disk in that order, at most at `bytes_per_s`. A block evicted from
memory is then usually on disk already and no eviction waits for a write. A block evicted before it was written is
counted as lost.

The disk is a ring of segments, written one after the other. When the last one is full, the oldest is reused and all its
copies are evicted at once: nothing is moved, and disk use is bounded. A block read back from the older half of the ring
is in use, and is written again.

| copy | found by `find` | takes space | after a restart |
|---|---|---|---|
| pending: in memory only | no | no | as memory has it |
| writing: returned by `next_writes` | no | yes | complete or absent |
| committed: confirmed by `written` | yes | yes | yes |
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tripool.cache.disk_records import PAGE, DiskCopy, DiskCounters, Purge, Segment, Write, footprint
from tripool.cache.records import Record, State

_MOST_WRITING = 16
_BURST_S = 1.0
"""Seconds of unused write rate that may accumulate."""


@dataclass(slots=True)
class _Ring:
    """Position of the next copy."""

    segment: int = 0
    offset: int = PAGE
    generation: int = 1


@dataclass(slots=True)
class _Bucket:
    """Token bucket in bytes. It may go negative after a large write, and then has to refill above zero."""

    bytes_per_s: float
    num_bytes: float = field(init=False)
    filled_s: float | None = None

    def __post_init__(self) -> None:
        self.num_bytes = self.bytes_per_s * _BURST_S

    def fill(self, now_s: float) -> None:
        passed_s = now_s - self.filled_s if self.filled_s is not None else 0.0
        self.num_bytes = min(self.num_bytes + passed_s * self.bytes_per_s, self.bytes_per_s * _BURST_S)
        self.filled_s = now_s


def _leaving_first(change: tuple[int, Record]) -> tuple[bool, int, int]:
    _, record = change
    return record.state is State.COMMITTED, record.ticket, record.position


class DiskTier:
    """`BackingTier` on a disk."""

    def __init__(
        self, num_segments: int, segment_bytes: int, *, bytes_per_s: float, namespace_bytes: int | None = None
    ) -> None:
        assert num_segments >= 2 and segment_bytes % PAGE == 0 and segment_bytes > 2 * PAGE and bytes_per_s > 0
        self.num_segments, self.segment_bytes = num_segments, segment_bytes
        self.capacity = num_segments * (segment_bytes - PAGE)
        self.counters = DiskCounters()
        self._namespace_bytes = namespace_bytes
        self._quotas: dict[bytes, int] = {}
        self._bucket = _Bucket(bytes_per_s)
        self._ring = _Ring()
        self._next_number = 1
        self._disk_copies: dict[bytes, DiskCopy] = {}
        self._in: list[dict[bytes, DiskCopy]] = [{} for _ in range(num_segments)]
        self._of: dict[bytes, OrderedDict[bytes, None]] = {}
        """Keys by namespace, oldest first."""
        self._held: Counter[bytes] = Counter()
        """Bytes by namespace, of committed copies and of those being written."""
        self._writing: dict[int, DiskCopy] = {}
        self._writing_keys: dict[bytes, int] = {}
        """Number of the write in progress for each key; purged keys are removed."""
        self._memory: dict[int, Record] = {}
        self._memory_bytes = 0
        self._slot_of: dict[bytes, int] = {}
        self._pending: OrderedDict[bytes, int] = OrderedDict()
        """Keys to be written, and the slot of each."""
        self._purges: list[Purge] = []
        """To be recorded on disk."""
        self._is_blocked = False
        """The next segment still has writes in flight."""

    # ---- memory changes ----------------------------------------------------------------------------------------

    def see(self, changes: Iterable[tuple[int, Record]]) -> None:
        """Take over changed slots of memory. Heads are written before their tails: a crash in between leaves a usable
        prefix.
        """
        for slot, record in sorted(changes, key=_leaving_first):
            before = self._memory.get(slot)
            if before is record or before == record:
                continue
            if before is not None:
                self._leaves(slot, before)
            if record.state is State.COMMITTED:
                self._memory[slot] = record
                self._memory_bytes += footprint(record.num_bytes)
                self._slot_of[record.key] = slot
                if self._is_wanted(record):
                    self._pending[record.key] = slot

    def _leaves(self, slot: int, record: Record) -> None:
        del self._memory[slot]
        self._memory_bytes -= footprint(record.num_bytes)
        if self._slot_of.get(record.key) == slot:
            del self._slot_of[record.key]
        if self._pending.get(record.key) == slot:
            del self._pending[record.key]
            self.counters.lost += record.key not in self._disk_copies

    def _is_wanted(self, record: Record) -> bool:
        if record.key in self._writing_keys or footprint(record.num_bytes) > self.segment_bytes - PAGE:
            return False
        copy = self._disk_copies.get(record.key)
        return copy is None or (self._ring.segment - copy.segment) % self.num_segments > self.num_segments // 2

    # ---- writing ------------------------------------------------------------------------------------------------

    def next_writes(self, now_s: float) -> list[Write]:
        """Writes to start now. Each must be answered by `written` or `failed`."""
        self._bucket.fill(now_s)
        writes: list[Write] = []
        while self._pending and len(self._writing) < _MOST_WRITING and self._bucket.num_bytes > 0:
            key, slot = next(iter(self._pending.items()))
            record = self._memory[slot]
            num_bytes = footprint(record.num_bytes)
            if not self._make_room(record.namespace, num_bytes):
                del self._pending[key]  # larger than its namespace's quota
                continue
            if not self._advance(num_bytes):
                self._is_blocked = True
                break
            ring = self._ring
            copy = DiskCopy(
                key, record.namespace, record.position, record.checksum, record.num_bytes, record.form,
                self._next_number, ring.segment, ring.offset, ring.generation,
            )  # fmt: skip
            self._next_number += 1
            ring.offset = copy.end
            self._bucket.num_bytes -= num_bytes
            self._writing[copy.number], self._writing_keys[key] = copy, copy.number
            self._held[copy.namespace] += num_bytes
            self._pending.pop(key, None)
            writes.append(Write(slot, copy))
        return writes

    @property
    def next_deadline_s(self) -> float | None:
        """Time at which `next_writes` has something to return, if nothing else changes."""
        if not self._pending or self._is_blocked or len(self._writing) >= _MOST_WRITING:
            return None
        if self._bucket.filled_s is None:
            return 0.0
        return self._bucket.filled_s + max(0.0, 1.0 - self._bucket.num_bytes) / self._bucket.bytes_per_s

    def written(self, number: int) -> None:
        """The write is durable: `find` returns the copy from now on."""
        copy = self._settle(number)
        if copy is not None:
            self.counters.written += 1
            self._commit(copy)
            self._make_room(copy.namespace, 0)

    def failed(self, number: int) -> None:
        """The slot was reused before it was copied. The space is lost until the segment is reused."""
        copy = self._settle(number)
        if copy is not None:
            slot = self._slot_of.get(copy.key)
            if slot is not None and self._is_wanted(self._memory[slot]):
                self._pending[copy.key] = slot
            else:
                self.counters.lost += copy.key not in self._disk_copies

    def _settle(self, number: int) -> DiskCopy | None:
        """End a write; None if its namespace was purged meanwhile."""
        copy = self._writing.pop(number)
        self._is_blocked = False
        self._hold(copy, -1)
        if self._writing_keys.get(copy.key) != number:
            return None
        del self._writing_keys[copy.key]
        return copy

    def _commit(self, copy: DiskCopy) -> None:
        self._forget(copy.key)
        self._disk_copies[copy.key] = self._in[copy.segment][copy.key] = copy
        self._of.setdefault(copy.namespace, OrderedDict())[copy.key] = None
        self._hold(copy, +1)

    def _forget(self, key: bytes) -> bool:
        copy = self._disk_copies.pop(key, None)
        if copy is None:
            return False
        del self._in[copy.segment][key], self._of[copy.namespace][key]
        if not self._of[copy.namespace]:
            del self._of[copy.namespace]
        self._hold(copy, -1)
        return True

    def _hold(self, copy: DiskCopy, sign: int) -> None:
        self._held[copy.namespace] += sign * footprint(copy.num_bytes)
        if not self._held[copy.namespace]:
            del self._held[copy.namespace]

    def _make_room(self, namespace: bytes, num_bytes: int) -> bool:
        """Evict the namespace's oldest copies until `num_bytes` more fit into its quota."""
        quota = self._quotas.get(namespace, self._namespace_bytes)
        if quota is None:
            return True
        while self._held[namespace] + num_bytes > quota and namespace in self._of:
            self.counters.forgotten += self._forget(next(iter(self._of[namespace])))
        return self._held[namespace] + num_bytes <= quota

    def _advance(self, num_bytes: int) -> bool:
        """Make `num_bytes` of space in the current segment, reusing the oldest segment if necessary."""
        ring = self._ring
        if ring.offset + num_bytes <= self.segment_bytes:
            return True
        following = (ring.segment + 1) % self.num_segments
        if any(copy.segment == following for copy in self._writing.values()):
            return False
        # If memory is nearly as large as the disk, rewriting what memory holds would evict itself for ever.
        again = 2 * self._memory_bytes <= self.capacity
        for key in list(self._in[following]):
            self.counters.forgotten += self._forget(key)
            if again and key in self._slot_of and key not in self._writing_keys:
                self._pending[key] = self._slot_of[key]
        ring.segment, ring.offset, ring.generation = following, PAGE, ring.generation + 1
        return True

    # ---- reading ------------------------------------------------------------------------------------------------

    def find(self, key: bytes, namespace: bytes) -> DiskCopy | None:
        copy = self._disk_copies.get(key)
        return copy if copy is not None and copy.namespace == namespace else None

    def was_read(self, copy: DiskCopy, intact: bool) -> None:
        """Result of reading a copy back. A copy whose segment was reused meanwhile does not count as damaged."""
        self.counters.promoted += intact
        if not intact and self._disk_copies.get(copy.key) == copy:
            self.counters.bad += 1
            self._forget(copy.key)
            slot = self._slot_of.get(copy.key)
            if slot is not None and self._is_wanted(self._memory[slot]):
                self._pending[copy.key] = slot

    # ---- tenants and restarts -----------------------------------------------------------------------------------

    def purge(self, namespace: bytes) -> int:
        """Evict a namespace; returns the number of blocks that were on disk only."""
        keys = list(self._of.get(namespace, ()))
        num_gone = sum(key not in self._slot_of for key in keys)
        for key in keys:
            self._forget(key)
        for key in [copy.key for copy in self._writing.values() if copy.namespace == namespace]:
            self._writing_keys.pop(key, None)
        for key in [key for key, slot in self._pending.items() if self._memory[slot].namespace == namespace]:
            del self._pending[key]
        self._next_number += 1
        self._purges.append(Purge(namespace, self._next_number - 1))
        return num_gone

    def take_purges(self) -> list[Purge]:
        """Purges since the last call, to be recorded on disk."""
        purges, self._purges = self._purges, []
        return purges

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        """Replace all quotas (bytes by namespace). Namespaces above theirs lose their oldest copies."""
        self._quotas = dict(quotas)
        num_before = self.num_disk_copies
        for namespace in list(self._of):
            self._make_room(namespace, 0)
        return num_before - self.num_disk_copies

    def restore(self, segments: Sequence[Segment], purges: Iterable[Purge] = ()) -> None:
        """Take over what a scan found on disk. Only for a tier that has written nothing; `see` may have been called
        already.

        Writing continues behind the last copy of the youngest segment.
        """
        assert len(segments) in (0, self.num_segments) and not self._disk_copies and not self._writing
        void: dict[bytes, int] = {}
        for purge in purges:
            void[purge.namespace] = max(purge.before, void.get(purge.namespace, 0))
        found = sorted((copy for segment in segments for copy in segment.disk_copies), key=lambda copy: copy.number)
        self._next_number = 1 + max([0, *void.values(), *(copy.number for copy in found)])
        youngest = max(range(len(segments)), key=lambda number: segments[number].generation, default=None)
        if youngest is not None and segments[youngest].generation:
            self._ring = _Ring(youngest, segments[youngest].end, segments[youngest].generation)
        for copy in found:
            if copy.number >= void.get(copy.namespace, 0):
                self._forget(copy.key)
                if self._make_room(copy.namespace, footprint(copy.num_bytes)):
                    self._commit(copy)
        for key in [key for key, slot in self._pending.items() if not self._is_wanted(self._memory[slot])]:
            del self._pending[key]

    # ---- inspection ---------------------------------------------------------------------------------------------

    @property
    def num_disk_copies(self) -> int:
        return len(self._disk_copies)

    @property
    def disk_copies(self) -> Mapping[bytes, DiskCopy]:
        """A snapshot of the committed copies, by key."""
        return dict(self._disk_copies)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def held_bytes(self) -> dict[bytes, int]:
        """Bytes on disk, by namespace."""
        return dict(self._held)

    def check(self) -> None:
        """Raise if copies overlap, are miscounted, are of an earlier generation of their segment, or exceed a quota."""
        in_segments = [key for keys in self._in for key in keys]
        assert len(in_segments) == len(self._disk_copies), "segments disagree"
        assert sum(map(len, self._of.values())) == len(self._disk_copies), "namespaces disagree"
        for key, copy in self._disk_copies.items():
            assert self._in[copy.segment].get(key) is copy, "a copy is in another segment"
            assert key in self._of[copy.namespace], "a copy is of another namespace"
        held: Counter[bytes] = Counter()
        extents: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_segments)]
        """By segment: (offset, end, generation) of every copy."""
        for copy in chain(self._disk_copies.values(), self._writing.values()):
            size = footprint(copy.num_bytes)
            held[copy.namespace] += size
            extents[copy.segment].append((copy.offset, copy.offset + size, copy.generation))
            assert copy.number < self._next_number, "a number from the future"
        assert held == self._held, "bytes are miscounted"
        assert held.total() <= self.capacity, "more than there is room for"
        for name, keys in self._of.items():
            quota = self._quotas.get(name, self._namespace_bytes)
            assert quota is None or held[name] <= quota or not keys, "above its quota"
        for number, disk_copies in enumerate(extents):
            last, limit = PAGE, self._ring.offset if number == self._ring.segment else self.segment_bytes
            for offset, end, generation in sorted(disk_copies):
                assert generation == disk_copies[0][2], f"segment {number} has two generations"
                assert offset >= PAGE and end <= limit, "a copy is out of bounds"
                assert offset >= last, "copies overlap"
                last = end
        assert {record.key: slot for slot, record in self._memory.items()} == self._slot_of, "memory disagrees"
        assert sum(footprint(record.num_bytes) for record in self._memory.values()) == self._memory_bytes
        for key, slot in self._pending.items():
            assert self._slot_of.get(key) == slot and key not in self._writing_keys, "pending without a block"
        assert all(self._writing[number].key == key for key, number in self._writing_keys.items())
