"""One engine: the pure scheduler, a runner and a sampler. A step is three verbs: schedule → run → settle.

With MTP a fourth: draft. A right guess at the next token lets the next step give two. It is the first thing the next
step does, so that this one's tokens need not wait for it.
"""

from __future__ import annotations

import time

import torch

from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.colocated import Scheduler
from tripool.engine.device import Place
from tripool.engine.drafter import Drafter
from tripool.engine.paged import Paged
from tripool.engine.runner import Runner, rows_of
from tripool.engine.sampler import Sampler
from tripool.errors import InvalidRequest
from tripool.models import Model
from tripool.models.arch import Arch
from tripool.sequence import Seq, Task
from tripool.text.files import TextFiles

_DEFAULT_CONTEXTS = 8
_DEFAULT_KV_BYTES = 2 * 2**30


class Engine(Paged):
    def __init__(
        self, name: str, model: Model, text: TextFiles, config: EngineConfig, place: Place | None = None
    ) -> None:
        """`place`: the device that the model was loaded on; None: this machine's own memory and cores."""
        mtp = config.mtp and model.mtp is not None
        num_blocks = kv_blocks(model.arch, config, mtp=mtp)
        scheduling = SchedulerConfig(
            num_blocks=num_blocks,
            max_running=config.max_running,
            step_tokens=max(config.step_tokens, config.max_running * (1 + mtp) + BLOCK_TOKENS),
            prefix_reuse=config.prefix_reuse,
        )
        scheduler = Scheduler(scheduling, model=name, context_tokens=model.arch.context_tokens)
        super().__init__(scheduler, text, name=name, vocab=model.arch.vocab, max_running=config.max_running)
        if place is None:
            self._runner, self._sampler = Runner(model, num_blocks=num_blocks, mtp=mtp), Sampler(model.arch.vocab)
        else:
            self._runner, self._sampler = place.runner(model, num_blocks, mtp=mtp), place.sampler(model)
        self._drafter = Drafter(self._runner, self._sampler) if mtp else None
        self._to_draft: tuple[list[Task], torch.Tensor] | None = None
        """The last step's tasks and final hidden states, until drafts are made from them."""
        self.weight_bytes = model.num_bytes
        self.kv_bytes = self._runner.kv_bytes

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
    def step(self) -> list[TokenEvent]:
        began_s = time.monotonic()
        self.draft()
        tasks = self.scheduler.schedule()
        if not tasks:
            return []
        hidden = self._runner.hidden([task.rows for task in tasks])
        events = self._settle(tasks, hidden)
        self.scheduler.timed(tasks, began_s, time.monotonic())
        if self._drafter is not None:
            self._to_draft = tasks, hidden
        return events

    @torch.inference_mode()
    def draft(self) -> None:
        """Catch up with the last step: fill the MTP layer's KV and propose drafts.

        Must come before the next `schedule`: until then no block changes hands, not even one that was given back.
        """
        if self._drafter is not None and self._to_draft is not None:
            for seq, draft in self._drafter.draft(*self._to_draft):
                self.scheduler.propose(seq, draft)
            self._to_draft = None

    def _settle(self, tasks: list[Task], hidden: torch.Tensor) -> list[TokenEvent]:
        """Sample where the known tokens end, and then, where that is what the draft said, after the draft as well.

        A second choice that the first may change (penalties, grammars) is made when that is settled.
        """
        rows: list[int] = []
        draft_rows: list[int] = []
        drafted: list[Task] = []
        row = 0
        for task in tasks:
            if task.samples:
                rows.append(row + len(task.work.tokens) - 1)
            if task.draft is not None:
                drafted.append(task)
                draft_rows.append(rows[-1] + 1)
            row += task.num_rows
        if not rows:
            return self.scheduler.settle(tasks, [None] * len(tasks))
        logits = self._runner.logits(rows_of(hidden, rows + draft_rows))
        seqs = [task.seq for task in tasks if task.samples]
        at_once = self._sampler.sample_at_once(logits, seqs)
        sampled = iter(at_once or self._sampler.sample(logits[: len(rows)], seqs))
        events = self.scheduler.settle(tasks, [next(sampled) if task.samples else None for task in tasks])
        followers = [self.scheduler.verify(task) for task in drafted]
        more = [task for task in followers if task is not None]
        if more:
            right = [i for i, task in enumerate(followers, len(rows)) if task is not None]
            if at_once is not None:
                later = [at_once[i] for i in right]
            else:
                later = self._sampler.sample(rows_of(logits, right), [task.seq for task in more])
            events += self.scheduler.settle(more, later)
        return events


def kv_blocks(arch: Arch, config: EngineConfig, *, mtp: bool) -> int:
    """What the user gives, or room for a few full contexts within a bound; always at least two blocks."""
    block_bytes = (arch.layers + mtp) * BLOCK_TOKENS * arch.kv_width * 4
    wanted = _DEFAULT_CONTEXTS * -(-arch.context_tokens // BLOCK_TOKENS)
    if config.kv_gb is not None:
        return max(2, int(config.kv_gb * 2**30 / block_bytes))
    return max(2, min(wanted, _DEFAULT_KV_BYTES // block_bytes))
