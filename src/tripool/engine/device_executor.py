"""The executor of an accelerator: a step's tokens are inputs of the next step before the host knows them.

`submit` waits for nothing: it uploads the step's inputs, starts network and sampling, and starts the copy of the tokens
to the host. With an MTP layer the plain executor runs: its drafts depend on tokens that the host has settled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tripool.engine.device_runner import DeviceRunner
from tripool.engine.device_sampler import Choice, DeviceSampler
from tripool.engine.executor import Pending, PlainExecutor
from tripool.engine.sampler import Guard
from tripool.sequence import UNKNOWN, Sampled, Seq, Task, Work


class DeviceExecutor(PlainExecutor):
    runner: DeviceRunner
    sampler: DeviceSampler

    def __init__(self, runner: DeviceRunner, sampler: DeviceSampler, *, guard: Guard) -> None:
        super().__init__(runner, sampler, mtp=False, guard=guard)
        self._sampled: dict[int, int] = {}
        """By a sequence's order: the index of its token among those that the last step sampled."""

    def submit(self, tasks: Sequence[Task]) -> Pending:
        work, rows, seqs, row = [], [], [], 0
        for task in tasks:
            piece = task.work
            work.append(piece if piece.tokens[-1] != UNKNOWN else self._referring(task.seq, piece))
            row += len(piece.tokens)
            if task.samples:
                rows.append(row - 1)
                seqs.append(task.seq)
        logits = self.runner.step_logits(work, rows)
        if not seqs:
            return _Submitted(tasks, None)
        choice = self.sampler.submit(logits, seqs, self._guard)
        self.runner.feed(choice.on_device)
        self._sampled = {seq.order: i for i, seq in enumerate(seqs)}
        return _Submitted(tasks, choice)

    def _referring(self, seq: Seq, piece: Work) -> Work:
        """Its newest token is the one that the last step samples."""
        return Work([*piece.tokens[:-1], -1 - self._sampled[seq.order]], piece.start, piece.table, piece.decode)


@dataclass(slots=True)
class _Submitted:
    tasks: Sequence[Task]
    choice: Choice | None

    def tokens(self) -> Sequence[Sampled | None]:
        sampled = iter(() if self.choice is None else self.choice.tokens())
        return [next(sampled) if task.samples else None for task in self.tasks]

    def tokens_after(self, accepted: Collection[Task]) -> Sequence[Sampled | None]:
        raise AssertionError("no drafts without an MTP layer")

    def drafts(self) -> Sequence[tuple[Seq, int]]:
        return ()
