"""Bugs of the disk tier that the simulation must notice, by a rule that fits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tripool.cache.disk_records import PAGE, Purge, Segment
from tripool.cache.disk_tier import DiskTier
from tripool.cache.index import PoolIndex
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.simulate.memory import SimArena

from .test_planted import run_seeds

Plant = Callable[[pytest.MonkeyPatch], None]


def what_the_disk_gives_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Neither the member nor its readers look at checksums."""
    was_read = TieredIndex.was_read
    patch.setattr(TieredIndex, "was_read", lambda self, read, found: was_read(self, read, found and read.copy.checksum))
    read = SimArena.read

    def trusting(self: SimArena, slot: int, into: Any) -> int:
        read(self, slot, into)
        return self.record(slot).checksum

    patch.setattr(SimArena, "read", trusting)


def a_look_up_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    answers = TieredIndex.answers
    patch.setattr(TieredIndex, "answers", lambda self, now_s: answers(self, -1.0))
    patch.setattr(TieredIndex, "was_read", lambda self, read, found: None)


def a_reader_is_not_fenced_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """What an earlier life was reading stays reserved, and nobody will ever say that it is over."""
    at_rest = PoolIndex.at_rest

    def deaf(self: PoolIndex, writer: Any) -> None:
        if not writer.name.startswith("cache-"):
            at_rest(self, writer)

    patch.setattr(PoolIndex, "at_rest", deaf)


def segments_are_reused_while_their_blocks_are_known(patch: pytest.MonkeyPatch) -> None:
    def careless(self: DiskTier, num_bytes: int) -> bool:
        ring = self._ring
        if ring.offset + num_bytes > self.segment_bytes:
            ring.segment, ring.offset = (ring.segment + 1) % self.num_segments, PAGE
            ring.generation += 1
        return True

    patch.setattr(DiskTier, "_advance", careless)


def a_restart_forgets_the_disk(patch: pytest.MonkeyPatch) -> None:
    restore = DiskTier.restore

    def half(self: DiskTier, segments: Sequence[Segment], purges: Iterable[Purge] = ()) -> None:
        restore(self, segments, purges)
        for key in list(self._disk_copies)[::2]:
            self._forget(key)

    patch.setattr(DiskTier, "restore", half)


def blocks_are_read_into_slots_that_are_given_back(patch: pytest.MonkeyPatch) -> None:
    read_copies = TieredIndex._read

    def hasty(self: TieredIndex, *args: Any) -> None:
        read_copies(self, *args)
        for read in self._reads[-1:]:
            assert isinstance(read, Read)
            self.index.commit(read.ticket, self._own, ())

    patch.setattr(TieredIndex, "_read", hasty)


PLANTS = [
    pytest.param(what_the_disk_gives_is_believed, "instead of", marks=pytest.mark.prove),  # dozens of seeds
    (a_look_up_waits_for_ever, "past its deadline"),
    (a_reader_is_not_fenced_after_a_restart, "hangs|past its deadline"),
    (segments_are_reused_while_their_blocks_are_known, "generations|not on disk|overlap|more than there is room for"),
    (a_restart_forgets_the_disk, "are gone"),
    (blocks_are_read_into_slots_that_are_given_back, "others may read|not reserved"),
]


@pytest.mark.parametrize(("plant", "caught_by"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_is_caught(plant: Plant, caught_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=caught_by):
        run_seeds()
