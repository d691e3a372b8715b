"""The executor of an accelerator: a step's tokens are inputs of the next step before the host knows them.

`submit_ahead` waits for nothing: it uploads the step's inputs, starts network and sampling, and starts the copy of the
tokens to the host. Drafts depend on tokens that the host has settled: with an MTP layer, `submit` is the plain
executor's, and `submit_ahead` runs the network alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tripool.engine.device_runner import DeviceRunner
from tripool.engine.device_sampler import Choice, DeviceSampler, waiter
from tripool.engine.executor import Pending, PlainExecutor
from tripool.engine.sampler import Guard
from tripool.sequence import UNKNOWN, Sampled, Seq, Task


class DeviceExecutor(PlainExecutor):
    runner: DeviceRunner
    sampler: DeviceSampler

    def __init__(self, runner: DeviceRunner, sampler: DeviceSampler, *, mtp: bool, guard: Guard) -> None:
        super().__init__(runner, sampler, mtp=mtp, guard=guard)
        self._sampled: dict[int, int] = {}
        """By a sequence's order: the index of its token among those that the last step sampled."""

    def submit(self, tasks: Sequence[Task]) -> Pending:
        return self.submit_ahead(tasks) if self.drafter is None else super().submit(tasks)

    def submit_ahead(self, tasks: Sequence[Task]) -> Pending:
        """Without drafts. Of each sequence whose newest token is `UNKNOWN`, the last step must have sampled it."""
        work, rows, seqs, row = [], [], [], 0
        for task in tasks:
            piece = task.work
            tokens = piece.tokens
            if tokens[-1] == UNKNOWN:
                tokens[-1] = -1 - self._sampled[task.seq.order]
            work.append(piece)
            row += len(tokens)
            if task.samples:
                rows.append(row - 1)
                seqs.append(task.seq)
        logits = self.runner.step_logits(work, rows)
        if not seqs:
            return _Submitted(tasks, None, waiter(logits))
        choice = self.sampler.submit(logits, seqs, self._guard, out=self.runner.sampled(len(seqs)))
        self._sampled = {seq.order: i for i, seq in enumerate(seqs)}
        return _Submitted(tasks, choice, choice.wait)


@dataclass(slots=True)
class _Submitted:
    tasks: Sequence[Task]
    choice: Choice | None
    wait: Callable[[], object]

    def tokens(self) -> Sequence[Sampled | None]:
        self.wait()  # also without a token: the host is one step ahead, never more
        sampled = [] if self.choice is None else self.choice.tokens()
        if len(sampled) == len(self.tasks):
            return sampled
        in_order = iter(sampled)
        return [next(in_order) if task.samples else None for task in self.tasks]

    def tokens_after(self, accepted: Collection[Task]) -> Sequence[Sampled | None]:
        raise AssertionError("a step that was submitted ahead has no drafts")

    def drafts(self) -> Sequence[tuple[Seq, int]]:
        return ()
