"""Executors run a scheduled batch on one device and give its tokens and the draft tokens for the next step.

`PlainExecutor` takes one operation at a time: network, logits, sampler, MTP layer. It is the reference, and it serves
where a kernel table has nothing faster. On CUDA its `DeviceRunner` replays captured graphs. `FusedExecutor` gives the
same tokens with fewer calls: the CPU's 8-bit kernels go from token ids to token ids in one call into C.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from tripool.engine.drafter import Drafter
from tripool.engine.prompt_scores import score_prompts
from tripool.engine.runner import Runner, rows_of
from tripool.engine.sampler import Guard, Sampler
from tripool.kernels.table import Draw
from tripool.models import Model
from tripool.sequence import Sampled, Seq, Task, Work


class Pending(Protocol):
    """A submitted batch. The calls come in this order, each at most once, before the next batch is submitted."""

    def tokens(self) -> Sequence[Sampled | None]:
        """The token after each task's work. None: the task does not reach its newest token, or its sampling failed."""

    def tokens_after(self, accepted: Collection[Task]) -> Sequence[Sampled | None]:
        """The token after the draft of each of these tasks, in the batch's order, once `tokens` is settled: penalties
        and grammars count the accepted draft."""

    def drafts(self) -> Sequence[tuple[Seq, int]]:
        """Draft tokens for the next step, once all tokens are settled. Fills the MTP layer's KV of this batch, so it
        comes before any block changes its owner."""


class Executor(Protocol):
    @property
    def runner(self) -> Runner:
        """The network and the paged KV memory."""

    def submit(self, tasks: Sequence[Task]) -> Pending: ...

    def attach(self, seq: Seq) -> None:
        """Prepare for a sequence whose blocks were filled by another worker."""


class PlainExecutor:
    def __init__(self, runner: Runner, sampler: Sampler, *, mtp: bool, guard: Guard) -> None:
        """`guard`: see `Sampler.sample`."""
        self.runner, self.sampler = runner, sampler
        self.drafter = Drafter(runner, self._draft) if mtp else None
        self._guard = guard

    def submit(self, tasks: Sequence[Task]) -> Pending:
        work, wanted = [task.rows for task in tasks], _Wanted.of(tasks)
        rows = wanted.rows + wanted.draft_rows
        draws = self.sampler.choices(wanted.seqs, [task.seq for task in wanted.drafted])
        if draws is not None:
            hidden, tokens = self._step(work, rows, draws)
            score_prompts(tasks, hidden, self.runner.logits)
            return _Submitted(tasks, wanted, hidden, self.drafter, partial(_take, [Sampled(t) for t in tokens]))
        hidden = self.runner.hidden(work)
        score_prompts(tasks, hidden, self.runner.logits)
        logits = self.runner.logits(rows_of(hidden, rows))
        return _Submitted(
            tasks,
            wanted,
            hidden,
            self.drafter,
            lambda indices, seqs: self.sampler.sample(rows_of(logits, indices), seqs, self._guard),
        )

    def attach(self, seq: Seq) -> None:
        if self.drafter is not None:
            self.drafter.attach(seq)

    def _step(self, work: Sequence[Work], rows: Sequence[int], draws: Sequence[Draw]) -> tuple[torch.Tensor, list[int]]:
        """Final hidden states of all rows, and what each draw chooses from the logits of its row."""
        hidden = self.runner.hidden(work)
        return hidden, self.sampler.choose(self.runner.logits(rows_of(hidden, rows)), draws) if rows else []

    def _draft(
        self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int], seqs: Sequence[Seq]
    ) -> Sequence[int]:
        """Run the MTP layer over `work`; the draft token that it gives each sequence after its row."""
        draws = self.sampler.draws(seqs) if seqs else None
        if draws is not None:
            return self._draft_step(work, hidden, rows, draws)
        logits = self.runner.draft_logits(work, hidden, rows)
        return self.sampler.guess(logits, seqs) if seqs else ()

    def _draft_step(
        self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> list[int]:
        return self.sampler.choose(self.runner.draft_logits(work, hidden, rows), draws)


class FusedExecutor(PlainExecutor):
    """One call for a step, one for its drafts, and one for both where a single sequence decodes."""

    def submit(self, tasks: Sequence[Task]) -> Pending:
        pending = self._step_with_draft(tasks[0]) if len(tasks) == 1 else None
        return super().submit(tasks) if pending is None else pending

    def _step_with_draft(self, task: Task) -> Pending | None:
        """None, and nothing done, where the call does not cover the task. The draft comes before this step's tokens go
        out, but so little later that the whole is faster."""
        if self.drafter is None or not self.drafter.up_to_date(task):
            return None
        draws = self.sampler.draws_ahead(task.seq, 3)
        return None if draws is None else _SubmittedWithDraft(task.seq, *self.runner.step_and_guess(task.rows, draws))

    def _step(self, work: Sequence[Work], rows: Sequence[int], draws: Sequence[Draw]) -> tuple[torch.Tensor, list[int]]:
        return self.runner.step(work, rows, draws)

    def _draft_step(
        self, work: Sequence[Work], hidden: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> list[int]:
        tokens = self.runner.draft_tokens(work, hidden, rows, draws)
        return super()._draft_step(work, hidden, rows, draws) if tokens is None else tokens


def cpu_executor(model: Model, num_blocks: int, *, mtp: bool, guard: Guard) -> Executor:
    """The fastest that the model's kernel table allows."""
    runner, sampler = Runner(model, num_blocks=num_blocks, mtp=mtp), Sampler(model.arch.vocab)
    kind = PlainExecutor if model.stack is None else FusedExecutor
    return kind(runner, sampler, mtp=mtp, guard=guard)


_Sample = Callable[[Sequence[int], Sequence[Seq]], Sequence[Sampled | None]]
"""Tokens at these indices among all wanted rows, for their sequences as they are now. None: sampling failed."""


def _take(sampled: Sequence[Sampled], indices: Sequence[int], seqs: Sequence[Seq]) -> list[Sampled]:
    """Chosen already: nothing that is settled in between changes them."""
    return [sampled[index] for index in indices]


@dataclass(slots=True)
class _Wanted:
    """The rows of a batch whose next tokens are wanted."""

    rows: list[int]
    """Where the known tokens of each sequence in `seqs` end."""
    seqs: list[Seq]
    draft_rows: list[int]
    """The draft's row of each task in `drafted`."""
    drafted: list[Task]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> _Wanted:
        wanted, row = cls([], [], [], []), 0
        for task in tasks:
            if task.samples:
                wanted.rows.append(row + len(task.work.tokens) - 1)
                wanted.seqs.append(task.seq)
            if task.draft is not None:
                wanted.drafted.append(task)
                wanted.draft_rows.append(wanted.rows[-1] + 1)
            row += task.num_rows
        return wanted


@dataclass(slots=True)
class _Submitted:
    tasks: Sequence[Task]
    wanted: _Wanted
    hidden: torch.Tensor
    drafter: Drafter | None
    sample: _Sample

    def tokens(self) -> Sequence[Sampled | None]:
        count = len(self.wanted.rows)
        sampled = self.sample(range(count), self.wanted.seqs) if count else ()
        if count == len(self.tasks):
            return sampled
        in_order = iter(sampled)
        return [next(in_order) if task.samples else None for task in self.tasks]

    def tokens_after(self, accepted: Collection[Task]) -> Sequence[Sampled | None]:
        first = len(self.wanted.rows)
        indices = [i for i, task in enumerate(self.wanted.drafted, first) if task in accepted]
        return self.sample(indices, [task.seq for task in accepted])

    def drafts(self) -> Sequence[tuple[Seq, int]]:
        return () if self.drafter is None else self.drafter.propose(self.tasks, self.hidden)


@dataclass(slots=True)
class _SubmittedWithDraft:
    """One sequence's step and the draft that follows it, both computed."""

    seq: Seq
    chosen: list[int]
    draft: int

    def tokens(self) -> Sequence[Sampled | None]:
        return (Sampled(self.chosen[0]),)

    def tokens_after(self, accepted: Collection[Task]) -> Sequence[Sampled | None]:
        return (Sampled(self.chosen[1]),)

    def drafts(self) -> Sequence[tuple[Seq, int]]:
        return ((self.seq, self.draft),) if self.seq.wants_draft else ()
