"""Background sequences: they run only in steps without other work, and are preempted first. Pure.

| while another sequence has work | |
|---|---|
| background sequences in the batch | keep their slots and blocks, and have no row |
| those that wait | do not start |
| another sequence needs a slot or blocks | it takes them from the youngest background sequence |

For some seconds after other work background steps are short: the first token of the next request waits for the step
under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tripool.decode import StepTime
from tripool.sequence import Seq, Task

if TYPE_CHECKING:
    from tripool.engine.scheduler import Scheduler

_LATELY_S = 5.0
_STEP_S = 0.02
"""Predicted duration of a short step."""
_LEAST_ROWS, _LEAST_PROMPT_TOKENS = 4, 16
_HEADS = 4
"""Waiting sequences for which blocks are made free before a step."""


class Background:
    def __init__(self, times: StepTime) -> None:
        self._times = times
        self.num_open = self._num_others = 0
        """Background sequences, and all others."""
        self._now_s = self._others_s = float("-inf")
        """When the last step ended, and the last one that computed others."""
        self.paused: frozenset[Seq] = frozenset()
        """Those in the batch that have no row in the next step."""
        self.yields = False
        """Whether others have work."""

    def joined(self, seq: Seq) -> None:
        self._count(seq, 1)

    def left(self, seq: Seq) -> None:
        self._count(seq, -1)

    def _count(self, seq: Seq, change: int) -> None:
        if seq.is_background:
            self.num_open += change
        else:
            self._num_others += change

    def settled(self, ended_s: float, tasks: Iterable[Task]) -> None:
        self._now_s = ended_s
        if not all(task.seq.is_background for task in tasks):
            self._others_s = ended_s

    def plan(self, batch: Sequence[Seq], waiting: Sequence[Seq]) -> None:
        """Before a step. `batch`: those that decode or have a prompt under way."""
        own = [seq for seq in batch if seq.is_background] if self.num_open else []
        self.yields = self._num_others > 0 and (len(own) < len(batch) or not all(seq.is_background for seq in waiting))
        if not self.yields:
            own = sorted(own, key=lambda seq: seq.num_generated)[self._most_rows() :] if self._is_short else []
        self.paused = frozenset(own)

    def allowed(self, waiting: list[Seq]) -> list[Seq]:
        """Those that may start in the step that was planned."""
        yields = self.num_open > 0 and self.yields
        return [seq for seq in waiting if not seq.is_background] if yields else waiting

    def prompt_tokens(self, budget: int) -> int:
        """Most prompt tokens of the step that was planned."""
        if not self.num_open or self.yields or not self._is_short:
            return budget
        token_s = self._times.prompt_token_s
        return min(budget, max(_LEAST_PROMPT_TOKENS, int(_STEP_S / token_s) if token_s > 0 else 0))

    def _most_rows(self) -> int:
        row_s = self._times.row_s
        return max(_LEAST_ROWS, int((_STEP_S - self._times.fixed_s) / row_s) if row_s > 0 else 0)

    @property
    def _is_short(self) -> bool:
        return self._now_s - self._others_s < _LATELY_S

    def check(self, live: Sequence[Seq]) -> None:
        own = sum(seq.is_background for seq in live)
        assert (own, len(live) - own) == (self.num_open, self._num_others), "background sequences are miscounted"


def first_victims(slo_is_background: bool, holders: Iterable[Seq]) -> tuple[list[Seq], list[Seq]]:
    """Background sequences that make room before any other rule applies, youngest first, and those for whom the other
    rules apply. A background sequence takes nothing from others."""
    own, others = list[Seq](), list[Seq]()
    for seq in holders:
        (own if seq.is_background else others).append(seq)
    if slo_is_background:
        return [], own
    return sorted(own, key=lambda seq: seq.order, reverse=True), others


def yield_to_others(scheduler: Scheduler) -> tuple[list[Seq], frozenset[Seq]]:
    """Before a step: make room for others that wait. Returns those that decode in it, and those that are paused."""
    background, prefill = scheduler.background, scheduler.prefill
    batch = [*scheduler.holders()]
    background.plan(batch, prefill.waiting)
    paused = background.paused
    ready = [seq for seq in prefill.waiting if not seq.is_background and not seq.waits] if paused else []
    excess = len(batch) + len(scheduler.arriving) + len(ready) - scheduler.max_running
    need = sum(map(prefill.blocks_needed, ready[:_HEADS]))
    for seq in sorted(paused, key=lambda seq: seq.order, reverse=True) if ready else ():
        if excess > 0 or not scheduler.pool.can_allocate(need):
            scheduler.preempt(seq)
            excess -= 1
    return [seq for seq in scheduler.decode.running if seq not in paused], paused
