"""What a scheduler checks: requests when they come, and its invariants: every block has its owner, every open sequence
is in one place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from tripool.config import SchedulerConfig
from tripool.core import Request
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.sequence import Seq

if TYPE_CHECKING:
    from tripool.engine.scheduler import Scheduler


def check_invariants(scheduler: Scheduler, config: SchedulerConfig, live: Sequence[Seq]) -> None:
    """`live`: all sequences that are not over."""
    prefill, decode = scheduler.prefill, scheduler.decode
    moving = [*scheduler.arriving, *scheduler.detached]
    holding = [*scheduler.holders(), *moving]
    scheduler.pool.check(chain((seq.table for seq in holding), scheduler.kept.lists))
    placed = sorted(seq.order for seq in chain(holding, prefill.waiting))
    assert placed == sorted(seq.order for seq in live), "a sequence is lost or in two places"
    assert len(holding) - len(scheduler.detached) <= config.max_running
    scheduler.sharing.check(live)
    scheduler.background.check(live)
    scheduler.slo_controller.check(live)
    for seq in holding:
        assert len(seq.table) * config.block_tokens >= seq.num_computed, "computed beyond its blocks"
        assert seq.num_computed < len(seq.tokens), "computed beyond what is known"
        assert seq.num_published * config.block_tokens <= seq.num_computed, "published what is not computed"
        assert seq.draft is None or seq.wants_draft, "a draft that no step can verify"
    for seq in prefill.waiting:
        assert not seq.table and seq.num_computed == 0, "a waiting sequence holds blocks"
        assert seq.draft is None and seq.carry is None, "a draft outlived its sequence's blocks"
    for seq in decode.running:
        assert seq.num_computed == len(seq.tokens) - 1


def check_prompt(request: Request, context_tokens: int) -> None:
    if not request.prompt_ids:
        raise InvalidRequest("the prompt holds no token", hint="send some text", param="prompt")
    if len(request.prompt_ids) >= context_tokens:
        hint = f"at most {context_tokens - 1} prompt tokens fit; shorten the prompt or give more KV memory"
        raise ContextOverflow.of(context_tokens, f"the prompt has {len(request.prompt_ids)} tokens", hint=hint)
