"""A cache member's disk in virtual time: what is on it, how long it takes, and what a crash leaves of it. Pure.

It outlives its member. What is being written when the member dies is there whole or not at all, as `cache.disk` writes
it; some of it has lost its bytes all the same (a disk that lied), and blocks rot when a fault says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tripool.cache.disk_records import PAGE, DiskCopy, Purge, Segment, footprint
from tripool.cache.disk_tier import DiskTier

Values = tuple[int, ...]

_SEGMENT_BLOCKS = 4
_DELAY_S = 0.01


@dataclass(frozen=True, slots=True)
class DiskSpec:
    num_segments: int
    blocks_per_s: float


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
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._num_jobs = 0
        self._damaged: set[int] = set()
        """Numbers of copies that are not what they were, by a fault."""
        self.is_full = False

    def new_tier(self) -> DiskTier:
        segment_bytes = PAGE + _SEGMENT_BLOCKS * self._block_bytes
        bytes_per_s = self._spec.blocks_per_s * self._block_bytes
        return DiskTier(self._spec.num_segments, segment_bytes, bytes_per_s=bytes_per_s)

    def found(self) -> tuple[list[Segment], list[Purge]]:
        """What a new life of the member finds."""
        segments = []
        for worker_id in self._segments:
            disk_copies = [copy for copy, _ in (worker_id.blocks or {}).values()]
            segments.append(
                Segment(worker_id.generation, tuple(disk_copies), max([PAGE, *(copy.end for copy in disk_copies)]))
            )
        return segments, list(self._purges)

    # ---- in time ------------------------------------------------------------------------------------------------

    def later(self, now_s: float, salt: int, do: Callable[[], None]) -> None:
        """Some jobs overtake others."""
        self._num_jobs += 1
        self._jobs.append((now_s + _DELAY_S * (1 + salt % 7), self._num_jobs, do))

    def turn(self, now_s: float) -> None:
        while due := sorted(job for job in self._jobs if job[0] <= now_s):
            self._jobs.remove(due[0])
            due[0][2]()

    def crash(self) -> None:
        """Its member is dead; nothing that was under way goes on."""
        self._jobs = []

    # ---- blocks -------------------------------------------------------------------------------------------------

    def put(self, copy: DiskCopy, values: Values) -> None:
        worker_id = self._segments[copy.segment]
        if worker_id.generation != copy.generation:
            assert copy.generation > worker_id.generation, "a segment's earlier life is written"
            self._segments[copy.segment] = worker_id = _Life(copy.generation)
        worker_id.blocks = {
            at: each for at, each in (worker_id.blocks or {}).items() if each[0].end <= copy.offset or at >= copy.end
        }
        worker_id.blocks[copy.offset] = copy, values

    def get(self, copy: DiskCopy) -> Values:
        """Whatever stands there."""
        found = (self._segments[copy.segment].blocks or {}).get(copy.offset)
        return found[1] if found is not None else ()

    def purge(self, purge: Purge | None) -> None:
        """None: it is switched off and cannot be told of one, so everything on it goes."""
        if purge is not None:
            self._purges.append(purge)
        else:
            self._segments = [_Life(worker_id.generation) for worker_id in self._segments]

    def damage(self, salt: int) -> int:
        """Every third block changes its bytes; its header does not. Returns how many."""
        num_damaged = 0
        for worker_id in self._segments:
            for offset, (copy, values) in (worker_id.blocks or {}).items():
                if (copy.number + salt) % 3 == 0 and values:
                    assert worker_id.blocks is not None
                    worker_id.blocks[offset] = copy, (*values[:-1], values[-1] + 1)
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
