"""A cache member's disk in virtual time: what is on it, how long it takes, and what a crash leaves of it.

It outlives its member. What is being written when the member dies is there whole or not at all, as the disk
store writes it; some of it is torn all the same (a disk that lied), and blocks rot when a fault says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from tripool.cache.arena import Arena
from tripool.cache.disk_records import PAGE, DiskCopy, Purge, Segment, Write, footprint
from tripool.cache.disk_tier import DiskTier
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.simulate.scenario import DiskSpec
from tripool.simulate.timeline import Timeline

Values = tuple[int, ...]

_SEGMENT_BLOCKS = 4
_DELAY_S = 0.01


@dataclass(slots=True)
class _Life:
    generation: int = 0
    blocks: dict[int, tuple[DiskCopy, Values]] | None = None
    """By offset."""


class SimDisk:
    def __init__(self, spec: DiskSpec, block_values: int) -> None:
        self._spec = spec
        self._block_bytes = footprint(block_values)
        self._segments = [_Life() for _ in range(spec.num_segments)]
        self._purges: list[Purge] = []
        self._damaged: set[int] = set()
        """Numbers of copies that are not what they were, by a fault."""
        self.is_full = False
        self.in_read: Callable[[], None] | None = None
        """A fault that strikes during the next read."""

    def new_tier(self) -> DiskTier:
        segment_bytes = PAGE + _SEGMENT_BLOCKS * self._block_bytes
        bytes_per_s = self._spec.blocks_per_s * self._block_bytes
        return DiskTier(self._spec.num_segments, segment_bytes, bytes_per_s=bytes_per_s)

    def found(self) -> tuple[list[Segment], list[Purge]]:
        """What the next run of the member finds."""
        segments = []
        for worker_id in self._segments:
            disk_copies = [copy for copy, _ in (worker_id.blocks or {}).values()]
            segments.append(
                Segment(worker_id.generation, tuple(disk_copies), max([PAGE, *(copy.end for copy in disk_copies)]))
            )
        return segments, list(self._purges)

    # ---- blocks -------------------------------------------------------------------------------------------------

    def put(self, copy: DiskCopy, values: Values) -> None:
        worker_id = self._segments[copy.segment]
        if worker_id.generation != copy.generation:
            assert copy.generation > worker_id.generation, "an earlier generation of a segment is written"
            self._segments[copy.segment] = worker_id = _Life(copy.generation)
        worker_id.blocks = {
            at: each for at, each in (worker_id.blocks or {}).items() if each[0].end <= copy.offset or at >= copy.end
        }
        worker_id.blocks[copy.offset] = copy, values

    def get(self, copy: DiskCopy) -> Values:
        """Whatever stands there."""
        found = (self._segments[copy.segment].blocks or {}).get(copy.offset)
        return found[1] if found is not None else ()

    def purge(self, purges: list[Purge] | None) -> None:
        """None: it is switched off and can record none, so everything on it goes."""
        if purges is not None:
            self._purges += purges
        else:
            self._segments = [_Life(worker_id.generation) for worker_id in self._segments]

    def damage(self, salt: int) -> int:
        """Every third block changes its bytes; its header does not. Returns how many."""
        num_damaged = 0
        for worker_id in self._segments:
            for offset, (copy, values) in (worker_id.blocks or {}).items():
                if (copy.number + salt) % 3 == 0 and values:
                    assert worker_id.blocks is not None
                    worker_id.blocks[offset] = copy, (*values[:-1], values[-1] ^ 1)
                    self._damaged.add(copy.number)
                    num_damaged += 1
        return num_damaged

    def tear(self, copy: DiskCopy, values: Values) -> None:
        """The disk said that these bytes were there, and they were not."""
        self._damaged.add(copy.number)
        self.put(copy, values[: len(values) // 2])

    def keeps(self, copy: DiskCopy) -> bool:
        """Whether an acknowledged copy can be read, or was taken by a fault."""
        found = (self._segments[copy.segment].blocks or {}).get(copy.offset)
        return copy.number in self._damaged or (found is not None and (found[0] is copy or found[0] == copy))


class SimDiskIo:
    """`DiskTasks` of one run of a member. Reads and writes take time, and some overtake others."""

    def __init__(
        self,
        disk: SimDisk,
        timeline: Timeline,
        tiered_index: TieredIndex,
        arena: Arena,
        turn: Callable[[], None],
        seen: Counter[str],
    ) -> None:
        """`turn`: the member's, to be called when something is done."""
        self.state = "on"
        self._disk, self._timeline, self._tiered_index, self._arena = disk, timeline, tiered_index, arena
        self._member_turn, self._seen = turn, seen
        self._writing: dict[int, tuple[Write, Values]] = {}
        self._crashed = False
        disk.is_full = False
        self.tier: DiskTier | None = disk.new_tier()
        self.tier.restore(*disk.found())
        tiered_index.add_tier(self.tier)

    def fileno(self) -> int:
        raise AssertionError("there is no descriptor in virtual time")

    def poll(self, now_s: float) -> None:
        if self.tier is None:
            return
        for read in self._tiered_index.take_reads(self.tier):
            self._later(read.slot, self._read, read)
            if self._disk.in_read is not None:
                strike, self._disk.in_read = self._disk.in_read, None
                self._timeline.call_at(now_s, strike)
        for write in self.tier.next_writes(now_s):
            self._writing[write.copy.number] = write, tuple(self._arena.view(write.slot, write.copy.num_bytes).tolist())
            self._later(write.slot, self._wrote, write.copy.number)

    def purge(self, namespace: bytes, then: Callable[[], None]) -> None:
        self._disk.purge(self.tier.take_purges() if self.tier is not None else None)
        then()

    def close(self) -> None:
        """A crash. What was being written is there, torn, or not there."""
        self._crashed = True
        for write, values in self._writing.values() if self.tier is not None else ():
            if write.copy.number % 3 == 0 and _is_intact(write, values):
                self._disk.put(write.copy, values)
            elif write.copy.number % 3 == 1:
                self._disk.tear(write.copy, values)
                self._seen["blocks torn on disk"] += 1

    def _later(self, salt: int, job: Callable[..., None], argument: Read[DiskCopy] | int) -> None:
        self._timeline.call_at(self._timeline.now_s + _DELAY_S * (1 + salt % 7), self._finish, job, argument)

    def _finish(self, job: Callable[..., None], argument: Read[DiskCopy] | int) -> None:
        if not self._crashed:
            job(argument)
            self._member_turn()

    def _read(self, read: Read[DiskCopy]) -> None:
        checksum = self._arena.write(read.slot, bytes(self._disk.get(read.copy)))
        self._tiered_index.was_read(read, checksum)

    def _wrote(self, number: int) -> None:
        write, values = self._writing.pop(number)
        tier = self.tier
        if tier is None:
            return
        if self._disk.is_full:
            self.tier, self.state = None, "off: full"
            self._seen["disks switched off"] += 1
            self._seen["blocks read from disk"] += tier.counters.promoted
            self._seen["blocks written to disk"] += tier.counters.written
            self._seen["bad blocks on disk"] += tier.counters.bad
            self._tiered_index.remove_tier(tier)
        elif _is_intact(write, values):
            self._disk.put(write.copy, values)
            tier.written(write.copy.number)
        else:
            self._seen["slots reused before they were copied"] += 1
            tier.failed(write.copy.number)


def _is_intact(write: Write, values: Values) -> bool:
    """Whether the slot still held its block when it was copied."""
    return xxh3_64_intdigest(bytes(values)) == write.copy.checksum
