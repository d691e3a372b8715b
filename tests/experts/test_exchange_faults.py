"""Faults change no row and leave nobody waiting; and a protocol with a bug is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experts.fault_world import Parts, World
from tripool.experts.exchange import ExpertServer, Owner, Replicas, Request
from tripool.experts.layout import LANES, Bell


@pytest.mark.parametrize("ten", range(4))
def test_faults_change_no_row(ten: int) -> None:
    worlds = [World(seed) for seed in range(10 * ten, 10 * ten + 10)]
    for world in worlds:
        world.run()
    assert sum(world.num_faults for world in worlds) > 5


@pytest.mark.prove
@pytest.mark.parametrize("hundred", range(20))
def test_many_faults_change_no_row(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        World(1000 + seed).run()


# ---- planted bugs -------------------------------------------------------------------------------------------------


class TakesAnyAnswer(Owner):
    """To an earlier request, or a late one of a rank that was given up."""

    def poll(self) -> bool:
        for segment in self._segments:
            if segment.bell is not None and not segment.answered:
                bell = self._view.combine_bell(self.rank, segment.rank, self._lane).read()
                segment.answered = bell.count == segment.bell.count
        return all(segment.answered for segment in self._segments)


class SendsNothingAgain(Owner):
    def reassign(self, table: Replicas, alive: Sequence[bool], epoch: int) -> None:
        self._epoch = epoch


class ForgetsLostRows(Owner):
    def reassign(self, table: Replicas, alive: Sequence[bool], epoch: int) -> None:
        self._epoch = epoch
        self._segments = [s for s in self._segments if s.answered or alive[s.rank]]


class RingsABusyRank(Owner):
    """Two requests in one lane: the second overwrites the segment of the first."""

    def ring(self) -> int | None:
        for segment in self._segments:
            if segment.bell is None:
                self._sequence += 1
                segment.bell = Bell(self._epoch, segment.count, self._sequence)
                self._slab.segments[segment.rank] = (segment.offset, segment.count)
                self._view.dispatch_bell(segment.rank, self.rank, self._lane).ring(segment.bell)
                return segment.rank
        return None


class IgnoresItsFence(Owner):
    @property
    def fenced(self) -> bool:
        return False


class BeginsAnew(Owner):
    """A new process counts from the beginning, as if nobody remembered its predecessor."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._sequence = 0


class RingsFirst(ExpertServer):
    """The doorbell before the payload."""

    def answer(self, request: Request) -> bool:
        self.ring(request)
        return super().answer(request)


class AnswersTheFenced(ExpertServer):
    def requests(self):
        for (source, lane), seen in self._seen.items():
            bell = self._view.dispatch_bell(self.rank, source, lane).read()
            if bell != seen:
                yield Request(source, lane, bell)


class ComparesSequences(ExpertServer):
    """And not epochs and counts."""

    def requests(self):
        for request in super().requests():
            if request.bell.sequence != self._seen[request.source, request.lane].sequence:
                yield request


class LeavesOldRequests(ExpertServer):
    """What its predecessor did not answer."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        ranks = range(self._view.layout.ranks)
        self._seen = {
            (source, lane): self._view.dispatch_bell(self.rank, source, lane).read()
            for source in ranks
            for lane in range(LANES)
        }


BUGS = {
    "any answer": Parts(owner=TakesAnyAnswer),
    "nothing sent again": Parts(owner=SendsNothingAgain),
    "lost rows forgotten": Parts(owner=ForgetsLostRows),
    "a busy rank rung": Parts(owner=RingsABusyRank),
    "sequences begin anew": Parts(owner=BeginsAnew, server=ComparesSequences),
    "doorbell before payload": Parts(server=RingsFirst),
    "no fences": Parts(owner=IgnoresItsFence, server=AnswersTheFenced),
    "old requests left": Parts(server=LeavesOldRequests),
    "two processes of one rank": Parts(reaps_first=False),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in range(200):
        try:
            World(seed, BUGS[bug]).run()
        except AssertionError:
            print(f"found with seed {seed}")
            return
    raise AssertionError("not found")
