"""Prefill scheduler: admits prompts and replays by age, reuses prefixes, computes chunks within a token budget. Pure.

The oldest waiting sequence goes first and none overtakes it, so nothing starves, unless the caller gives another order.
Further choices of a request wait until its first one has computed the prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tripool.cache import BlockPool, next_key
from tripool.config import SchedulerConfig
from tripool.sequence import Seq, Task

SCORED_TOKENS = 256
"""Most prompt tokens of a step whose log-probabilities are wanted: each takes as much as a sampled token."""
MASKS_S = 0.03
"""Time in a step for the masks of grammars of prompts, and as much for those of rows. The last one may exceed it. Most
need a hundredth of it."""

Grow = Callable[[Seq, int], int]
"""grow(seq, stop): give seq blocks for positions below `stop`, or below as much of it as it returns."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What heavy tenants may have of one step: see `engine/time_shares.py`."""

    tenants: frozenset[str] = frozenset()
    rows: int = 0
    prompt_tokens: int = 0

    def is_heavy(self, seq: Seq) -> bool:
        return seq.request.slo.tenant in self.tenants


NO_LIMITS = StepLimits()


class PrefillScheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool, model: str) -> None:
        self._config = config
        self._pool = pool
        self._model = model
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.started: list[Seq] = []
        """Those that the last `plan` admitted for the first time."""
        self.queue: Sequence[Seq] = self.waiting
        """Those that wait in the order in which the next `plan` may admit them, if that is not by age."""
        self.limit = NO_LIMITS
        """Whose prompts come last in the next `plan`, and how much of them it computes."""
        self.left_out: Collection[Seq] = ()
        """Those under way that have no part in the next `plan`."""
        self.held_by = ""
        """Which limit kept the last `plan` from admitting the oldest that waits; empty when none waits."""

    def add(self, seq: Seq) -> None:
        """A new or a preempted sequence; it queues by age, not by when it came back."""
        assert not seq.table and seq.num_computed == 0
        insort(self.waiting, seq, key=_age)

    def remove(self, seq: Seq) -> None:
        """Forget it, blocks and all: finished, cancelled, preempted or moved on."""
        (self.running if seq in self.running else self.waiting).remove(seq)

    def plan(self, budget: int, slots: int, grow: Grow) -> list[Task]:
        """Chunks for this step: those under way, oldest first, then newcomers while `slots` and `budget` last."""
        tasks: list[Task] = []
        self.started = []
        self.held_by = ""
        if not self.running and not self.queue:
            return tasks
        short_of_blocks = False
        limit = self.limit
        left, masks_s = limit.prompt_tokens, MASKS_S
        for seq in sorted(self.running, key=limit.is_heavy):
            most = _most(seq, min(budget, left) if limit.is_heavy(seq) else budget)
            if seq.needs_result or (seq.mask_s and masks_s <= 0) or seq in self.left_out:
                continue
            if most > 0 and seq in self.running:  # growing an older one may have preempted this one
                masks_s -= seq.mask_s
                wanted = seq.work_stop(most)
                granted = grow(seq, wanted)
                short_of_blocks |= granted < wanted
                count = _chunk(seq, granted, tasks)
                budget, left = budget - count, left - count * limit.is_heavy(seq)
        for seq in list(self.queue):
            if budget <= 0 or slots <= 0 or short_of_blocks:
                # Short of blocks: a newcomer would only take those that the ones under way are waiting for.
                self.held_by = "tokens per step" if budget <= 0 else "batch slots" if slots <= 0 else "KV memory"
                break
            heavy = limit.is_heavy(seq) if limit.tenants else False
            most = _most(seq, min(budget, left) if heavy else budget)
            if seq.waits or most <= 0 or (seq.mask_s and masks_s <= 0):
                continue  # for slow masks too: they go on in the next step, and those without need not wait for them
            if not self._admit(seq):
                self.held_by = "KV memory"
                break
            slots -= 1
            masks_s -= seq.mask_s
            count = _chunk(seq, grow(seq, seq.work_stop(most)), tasks)
            budget, left = budget - count, left - count * heavy
        return tasks

    def blocks_needed(self, seq: Seq) -> int:
        """That must be free for it to start: everything known plus one token, less what others hold of its prefix."""
        return self._needs(seq, self._prefix(seq))

    def publish(self, seq: Seq, num_computed: int) -> None:
        """Name the blocks that are full, so that others with the same beginning find them."""
        num_full = num_computed // self._config.block_tokens
        if num_full > seq.num_published and self._config.prefix_reuse:
            keys = extend_keys(seq, num_computed, self._config.block_tokens, self._model)
            for i in range(seq.num_published, num_full):
                self._pool.publish(seq.table[i], keys[i])
            seq.num_published = num_full

    def _prefix(self, seq: Seq) -> list[int]:
        """The last token is always computed: its logits are what the request is here for."""
        reuse = self._config.prefix_reuse and not seq.scores_prompt  # a score needs its row computed
        found = self._pool.match(self._keys(seq)) if reuse else []
        return found[: (len(seq.tokens) - 1) // self._config.block_tokens]

    def _needs(self, seq: Seq, found: list[int]) -> int:
        return len(seq.tokens) // self._config.block_tokens + 1 - len(found) + self._pool.num_idle(found)

    def _admit(self, seq: Seq) -> bool:
        """Take the known prefix and start, if it fits into free blocks. A newcomer does not preempt here."""
        found = self._prefix(seq)
        if not self._pool.can_allocate(self._needs(seq, found)):
            return False
        self._pool.acquire(found)
        seq.table.extend(found)
        seq.num_computed = len(found) * self._config.block_tokens
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed
            self.started.append(seq)
        self.waiting.remove(seq)
        insort(self.running, seq, key=_age)
        return True

    def _keys(self, seq: Seq) -> list[bytes]:
        return extend_keys(seq, len(seq.tokens), self._config.block_tokens, self._model)


def _most(seq: Seq, most: int) -> int:
    return min(most, SCORED_TOKENS) if seq.scores_prompt else most


def _chunk(seq: Seq, stop: int, tasks: list[Task]) -> int:
    if stop > seq.num_computed:
        tasks.append(Task(seq, seq.work(stop - seq.num_computed)))
    return stop - seq.num_computed


def extend_keys(seq: Seq, num_tokens: int, block_tokens: int, model: str) -> list[bytes]:
    """Keys of the full blocks among the first `num_tokens`, remembered in the sequence."""
    request = seq.request
    num_public = request.public_tokens // block_tokens
    while (len(seq.keys) + 1) * block_tokens <= num_tokens:
        start = len(seq.keys) * block_tokens
        tokens = seq.tokens[start : start + block_tokens]
        seq.keys.append(next_key(seq.keys, tokens, model=model, namespace=request.namespace, num_public=num_public))
    return seq.keys


def _age(seq: Seq) -> int:
    return seq.order
