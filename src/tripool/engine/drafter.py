"""Draft tokens by the model's MTP layer: one for each sequence's next token, for the next step to verify.

Row j of the layer takes the final hidden state of position j - 1 and the token at j, writes slot j of its KV, and
predicts position j + 1. After a step the layer catches up to every sequence's newest token in one batched call: slots
of prompt tokens in prompt form, later ones in decode form, as in the network. Only final tokens go in, so published
blocks hold valid KV of this layer too. Three exceptions:

- The newest token's slot may lie in a block that is not allocated yet: its hidden state is kept for the next step.
- After a prefix hit the hidden state before the first computed token is unknown: that one slot is zeroed. Drafts after
  it are a little worse; the text is the same, because every draft is verified.
- Steps that propose nothing (`OverlappedEngine`) fill the slots of prompts, and zero those of answers.

A sequence from another worker brings the layer's KV in its blocks, but no hidden state: the newest token's slot is
filled or, if it is the first of a block, zeroed as after a prefix hit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.runner import Runner, rows_of
from tripool.sequence import Seq, Task, Work

_logger = logging.getLogger("tripool.engine")


@dataclass(frozen=True, slots=True)
class Carry:
    """State of a sequence between two steps, in `Seq.carry`; None there: the sequence has just been admitted."""

    hidden: torch.Tensor | None
    """Of the last computed token, if the slot after it is not filled yet."""


_NOTHING_DUE = Carry(None)


@dataclass(slots=True)
class _Rows:
    """The rows that the layer runs after a step."""

    work: list[Work] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Index of each row's hidden state: among this step's, or after those among the carried ones."""
    carried: list[torch.Tensor] = field(default_factory=list)
    drafting: list[Seq] = field(default_factory=list)
    last_rows: list[int] = field(default_factory=list)
    """The row of each drafting sequence that predicts its next token."""


Draft = Callable[[Sequence[Work], torch.Tensor, Sequence[int], Sequence[Seq]], Sequence[int]]
"""Runs the MTP layer over work and the hidden states before it; the draft token of each sequence after its row."""


class Drafter:
    def __init__(self, runner: Runner, draft: Draft) -> None:
        self._runner, self._draft = runner, draft
        self._failed = False
        """Whether the last call failed: repeated failures are logged once."""

    def propose(self, tasks: Sequence[Task], hidden: torch.Tensor) -> Sequence[tuple[Seq, int]]:
        """Draft tokens after a step that is settled. `hidden`: final hidden states of all its rows, drafts included.

        A failure costs the drafts and nothing else: the layer goes on as after a prefix hit.
        """
        try:
            drafts = self._catch_up(tasks, hidden)
        except Exception:
            if not self._failed:
                _logger.exception("drafting failed; answers go on without")
            self._failed = True
            for task in tasks:
                task.seq.carry = task.seq.draft = None
            return ()
        self._failed = False
        return drafts

    def _catch_up(self, tasks: Sequence[Task], hidden: torch.Tensor) -> Sequence[tuple[Seq, int]]:
        rows, row = _Rows(), 0
        for task in tasks:
            if task.seq.num_computed >= task.work.stop:  # else it failed in this step
                self._follow(task, row, hidden, rows)
            row += task.num_rows
        if not rows.work:
            return ()
        drafts = self._draft(rows.work, _gather(hidden, rows), rows.last_rows, rows.drafting)
        return list(zip(rows.drafting, drafts, strict=True))

    def up_to_date(self, task: Task) -> bool:
        """Whether a step of this task's rows and of the layer after them leaves nothing to catch up with: for the
        newest token of an answer with no slot due before it and with room for the next ones."""
        seq, work = task.seq, task.work
        settled = len(work.tokens) == 1 and task.samples and seq.carry is _NOTHING_DUE
        newest = work.stop + (task.draft is not None)
        return work.decode and settled and newest < len(work.table) * BLOCK_TOKENS

    def attach(self, seq: Seq) -> None:
        """A sequence whose blocks were filled by another worker's network and drafter."""
        seq.carry = _NOTHING_DUE if seq.num_computed % BLOCK_TOKENS else None

    def _follow(self, task: Task, row: int, hidden: torch.Tensor, rows: _Rows) -> None:
        """Add the slots that this task has made computable. Its own rows begin at `row` of `hidden`."""
        seq, table, start = task.seq, task.work.table, task.work.start
        first, stop = start + 1, seq.num_computed
        if seq.carry is None and start > 0:
            self._runner.clear_mtp(table, start)
        elif isinstance(seq.carry, Carry) and seq.carry.hidden is not None:
            first = start
            rows.sources.append(len(hidden) + len(rows.carried))
            rows.carried.append(seq.carry.hidden)
        # A finished sequence still fills the slots of its published blocks, but not the one after its last token.
        newest = seq.finish is None and stop < len(table) * BLOCK_TOKENS
        end = stop + newest
        rows.sources.extend(range(row, row + end - 1 - start))
        for begin, until, decode in ((first, min(end, seq.prompt_len), False), (max(first, seq.prompt_len), end, True)):
            if begin < until:
                rows.work.append(Work(seq.tokens[begin:until], begin, table, decode))
        seq.carry = _NOTHING_DUE if newest else Carry(hidden[row + stop - 1 - start].clone())
        if newest and seq.wants_draft:
            rows.drafting.append(seq)
            rows.last_rows.append(len(rows.sources) - 1)


def _gather(hidden: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """The hidden state of each row; usually a view."""
    if rows.carried:
        return torch.cat((hidden, torch.stack(rows.carried)))[rows.sources]
    return rows_of(hidden, rows.sources)
