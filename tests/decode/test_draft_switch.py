"""The draft switch: the faster kind of step runs, for each size of the batch; the other is tried, and tried again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tripool.decode.draft_switch import _AGAIN, _STAY, _STEPS, DraftSwitch

Cost = Callable[[int, bool], tuple[int, float]]
"""Of sequences, and of whether drafts are verified: tokens and duration of a step."""


def crossing(num_seqs: int, drafts: bool) -> tuple[int, float]:
    """Drafts give 1.7 tokens. Below 32 sequences a step with them takes little longer, above it twice as long."""
    if not drafts:
        return num_seqs, 0.010
    return int(1.7 * num_seqs), 0.012 if num_seqs < 32 else 0.020


def drive(switch: DraftSwitch, num_seqs: int, num_steps: int, cost: Cost) -> list[bool]:
    kinds = []
    for _ in range(num_steps):
        kinds.append(switch.choose(num_seqs))
        switch.measured(num_seqs, *cost(num_seqs, kinds[-1]))
    return kinds


def test_each_size_of_the_batch_gets_the_faster_kind() -> None:
    switch = DraftSwitch()
    for num_seqs, drafts in ((8, True), (64, False), (8, True), (64, False), (16, True)):
        kinds = drive(switch, num_seqs, 400, crossing)
        assert set(kinds[-200:]) == {drafts}, num_seqs
    assert kinds[:_STEPS].count(True) == 0, "at first the kind that ran before"


def test_the_other_kind_is_tried_again_and_taken_when_it_has_become_faster() -> None:
    switch = DraftSwitch()
    drive(switch, 8, 400, crossing)
    kinds = drive(switch, 8, _AGAIN + 2 * _STAY, lambda n, drafts: (n, 0.012 if drafts else 0.010))
    assert kinds[0] and not kinds[-1]
    back = drive(switch, 8, _AGAIN + 2 * _STAY, crossing)
    assert not back[0] and back[-1]


def test_one_slow_step_and_a_small_difference_change_nothing() -> None:
    switch = DraftSwitch()
    assert all(drive(switch, 4, 2 * _STAY + _STEPS, crossing)[-_STEPS:])

    def slow_at_times(num_seqs: int, drafts: bool) -> tuple[int, float]:
        seen.append(drafts)
        return num_seqs, 5.0 if len(seen) % 30 == 7 else 0.0101 if drafts else 0.0100

    seen: list[bool] = []
    assert all(drive(switch, 4, 3000, slow_at_times)[-100:])


def test_kinds_do_not_alternate_faster_than_they_can_be_measured() -> None:
    """A batch whose size crosses the border at every step."""
    switch, kinds = DraftSwitch(), list[bool]()
    for step in range(4000):
        kinds += drive(switch, 31 if step % 2 else 64, 1, crossing)
    changes = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
    assert all(after - before >= _STAY for before, after in pairwise(changes))
