"""The running batch: every sequence whose prompt is done takes one token per step, oldest first. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection

from tripool.sequence import Seq, Task


class DecodeScheduler:
    def __init__(self) -> None:
        self.running: list[Seq] = []
        self.left_out: Collection[Seq] = ()
        """Those that have no row in the next `plan`."""

    def admit(self, seq: Seq) -> None:
        """From prefill, blocks included: the hand-over is a move of the block table."""
        assert seq.prompt_done and seq.num_computed == len(seq.tokens) - 1
        if not self.running or self.running[-1].order < seq.order:
            self.running.append(seq)  # the youngest, as almost always
        else:
            insort(self.running, seq, key=lambda s: s.order)

    def remove(self, seq: Seq) -> None:
        self.running.remove(seq)

    def plan(self, grow: Callable[[Seq, int], int]) -> list[Task]:
        """One task per sequence that has room for its next token.

        `grow` may preempt younger sequences of this list. One that it refuses keeps its blocks and waits: older ones
        finish, or take them.
        """
        tasks, running, left_out = [], self.running, self.left_out
        batch = list(running)
        count = len(batch)
        for seq in batch:
            if len(running) < count and seq not in running:
                continue  # preempted for an older one
            if (left_out and seq in left_out) or seq.needs_result:
                continue
            start = seq.num_computed
            if grow(seq, start + 1) > start:
                tasks.append(Task(seq, seq.work(1)))
        return tasks
