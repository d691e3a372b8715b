"""One engine: the pure scheduler, a runner and a sampler. A step is three verbs: schedule → run → settle.

With MTP a fourth: draft. A right guess at the next token lets the next step give two. It is the first thing the next
step does, so that this one's tokens need not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.device import DeviceSpec
from tripool.engine.drafter import Drafter
from tripool.engine.paged import Paged
from tripool.engine.runner import Runner, rows_of
from tripool.engine.sampler import Sampler
from tripool.engine.scheduler import Scheduler
from tripool.errors import InvalidRequest
from tripool.models import Model
from tripool.models.arch import Arch
from tripool.sequence import Sampled, Seq, Task
from tripool.text.files import TextFiles

_DEFAULT_CONTEXTS = 8
_DEFAULT_KV_BYTES = 2 * 2**30

_logger = logging.getLogger("tripool.engine")


class Engine(Paged):
    def __init__(
        self, name: str, model: Model, text: TextFiles, config: EngineConfig, device_spec: DeviceSpec | None = None
    ) -> None:
        """`device_spec`: the device that the model was loaded on; None: this machine's own memory and cores."""
        mtp = config.mtp and model.mtp is not None
        num_blocks = kv_blocks(model.arch, config, mtp=mtp)
        self._bounds = SchedulerConfig(
            num_blocks=num_blocks,
            max_running=config.max_running,
            step_tokens=max(config.step_tokens, config.max_running * (1 + mtp) + BLOCK_TOKENS),
            prefix_reuse=config.prefix_reuse,
        )
        scheduler = Scheduler(self._bounds, model=name, context_tokens=model.arch.context_tokens)
        super().__init__(scheduler, text, name=name, vocab=model.arch.vocab, max_running=config.max_running)
        if device_spec is None:
            self._runner, self._sampler = Runner(model, num_blocks=num_blocks, mtp=mtp), Sampler(model.arch.vocab)
        else:
            self._runner, self._sampler = device_spec.runner(model, num_blocks, mtp=mtp), device_spec.sampler(model)
        self._drafter = Drafter(self._runner, self._sampler) if mtp else None
        self._to_draft: tuple[list[Task], torch.Tensor] | None = None
        """The last step's tasks and final hidden states, until drafts are made from them."""
        self._draft_failed = False
        """The last time; what fails again and again is logged once."""
        self.weight_bytes = model.num_bytes
        self.kv_bytes = self._runner.kv_bytes

    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner.warm`."""
        self._runner.warm(self._bounds.max_running, self._bounds.step_tokens, progress)

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified."""
        return self.scheduler.num_drafted

    @property
    def num_accepted(self) -> int:
        """Drafts that came true: tokens that needed no step of their own."""
        return self.scheduler.num_accepted

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def start(self, seq: Seq) -> None:
        if self._drafter is not None:
            self._drafter.welcome(seq)
        super().start(seq)

    def export_block(self, block: int, into: memoryview) -> None:
        self._runner.export_block(block, into)

    def import_block(self, block: int, data: memoryview) -> None:
        self._runner.import_block(block, data)

    def check(self, request: Request) -> None:
        params = request.params
        named = {"prompt": request.prompt_ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for where, ids in named.items():
            bad = next((i for i in ids if not 0 <= i < self.vocab), None)
            if bad is not None:
                raise InvalidRequest(
                    f"token {bad} in {where} does not exist", hint=f"ids end at {self.vocab - 1}", param=where
                )

    @torch.inference_mode()
    def compute(self, tasks: list[Task]) -> list[TokenEvent]:
        events = self._alone(tasks[0]) if len(tasks) == 1 else None
        if events is None:
            asked = _Asked.of(tasks)
            hidden, sample = self._run(tasks, asked)
            events = self._settle(tasks, asked, sample)
            self._to_draft = None if self._drafter is None else (tasks, hidden)
        return events

    @torch.inference_mode()
    def draft(self) -> None:
        """Catch up with the last step: fill the MTP layer's KV and propose drafts.

        Must come before the next `schedule`: until then no block changes hands, not even one that was given back. When
        it fails there are no drafts, which nobody needs, and the layer goes on as after a prefix hit.
        """
        if self._drafter is None or self._to_draft is None:
            return
        (tasks, hidden), self._to_draft = self._to_draft, None
        try:
            for seq, draft in self._drafter.draft(tasks, hidden):
                self.scheduler.propose(seq, draft)
        except Exception:
            if not self._draft_failed:
                _logger.exception("drafting failed; answers go on without")
            self._draft_failed = True
            for task in tasks:
                task.seq.carry = task.seq.draft = None
        else:
            self._draft_failed = False

    def _alone(self, task: Task) -> list[TokenEvent] | None:
        """A step of one sequence with its draft in one call; None, and nothing done, where there is none for it.

        The draft comes before this step's tokens go out, but so little later that everybody gains.
        """
        at_once = None if self._drafter is None else self._drafter.at_once(task)
        if at_once is None:
            return None
        tokens, guess = at_once
        events = self.settle_each([task], [Sampled(tokens[0])])
        more = self.scheduler.verify(task)
        if more is not None:
            events += self.settle_each([more], [Sampled(tokens[1])])
        if task.seq.wants_draft:
            self.scheduler.propose(task.seq, guess)
        return events

    def _run(self, tasks: list[Task], asked: _Asked) -> tuple[torch.Tensor, _Sample]:
        """Final hidden states and, if they can be chosen in the same call, all the tokens that are asked for."""
        work, rows = [task.rows for task in tasks], asked.rows + asked.draft_rows
        draws = self._sampler.choices(asked.seqs, [task.seq for task in asked.drafted]) if rows else None
        if draws is not None:
            at_once = self._runner.hidden_and_choices(work, rows, draws)
            if at_once is not None:
                return at_once[0], partial(_take, [Sampled(token) for token in at_once[1]])
        hidden = self._runner.hidden(work)
        if not rows:
            return hidden, partial(_take, ())
        logits = self._runner.logits(rows_of(hidden, rows))
        sampled = self._sampler.sample_at_once(logits, asked.seqs)
        if sampled is not None:
            return hidden, partial(_take, sampled)
        return hidden, lambda places, seqs: self._sampler.sample(rows_of(logits, places), seqs, self.guarded)

    def _settle(self, tasks: list[Task], asked: _Asked, sample: _Sample) -> list[TokenEvent]:
        """Sample where the known tokens end, and then, where that is what the draft said, after the draft as well.

        A second choice that the first may change (penalties, grammars) is made when that is settled.
        """
        if not asked.rows:
            return self.settle_each(tasks, [None] * len(tasks))
        sampled = iter(sample(range(len(asked.rows)), asked.seqs))
        events = self.settle_each(tasks, [next(sampled) if task.samples else None for task in tasks])
        followers = [self.scheduler.verify(task) for task in asked.drafted]
        more = [task for task in followers if task is not None]
        if more:
            right = [i for i, task in enumerate(followers, len(asked.rows)) if task is not None]
            events += self.settle_each(more, sample(right, [task.seq for task in more]))
        return events


_Sample = Callable[[Sequence[int], Sequence[Seq]], Sequence[Sampled | None]]
"""Tokens at these places among all that a step was asked for, for their sequences as they are now. None: it failed."""


def _take(sampled: Sequence[Sampled], places: Sequence[int], seqs: Sequence[Seq]) -> list[Sampled]:
    """Chosen already: nothing that was settled meanwhile changes them."""
    return [sampled[device_spec] for device_spec in places]


@dataclass(slots=True)
class _Asked:
    """What a step's tasks want to know of its rows."""

    rows: list[int]
    """Those that the next token of each sequence in `seqs` is sampled after."""
    seqs: list[Seq]
    draft_rows: list[int]
    """And those of the drafts, one for each task in `drafted`."""
    drafted: list[Task]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> _Asked:
        asked, row = cls([], [], [], []), 0
        for task in tasks:
            if task.samples:
                asked.rows.append(row + len(task.work.tokens) - 1)
                asked.seqs.append(task.seq)
            if task.draft is not None:
                asked.drafted.append(task)
                asked.draft_rows.append(asked.rows[-1] + 1)
            row += task.num_rows
        return asked


def kv_blocks(arch: Arch, config: EngineConfig, *, mtp: bool) -> int:
    """What the user gives, or room for a few full contexts within a bound; always at least two blocks."""
    block_bytes = (arch.layers + mtp) * BLOCK_TOKENS * arch.kv_width * 4
    wanted = _DEFAULT_CONTEXTS * -(-arch.context_tokens // BLOCK_TOKENS)
    if config.kv_gb is not None:
        return max(2, int(config.kv_gb * 2**30 / block_bytes))
    return max(2, min(wanted, _DEFAULT_KV_BYTES // block_bytes))
