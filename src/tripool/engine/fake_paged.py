"""The fake engine with an engine's memory: the real scheduler, and blocks whose bytes can be handed to another process.

Tokens are those of `FakeEngine`. A slot of its KV holds a hash of all tokens up to that position, made from the slot
before it: whoever reads a block that is not what it should be gets another token, and a test sees it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tripool.config import SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, ServingStats, TokenEvent
from tripool.engine.colocated import Scheduler
from tripool.engine.fake import FakeTokens
from tripool.grammar import GrammarCompiler
from tripool.sequence import Guide, Sampled, Seq, Task
from tripool.text.files import TextFiles

_SLOT_BYTES = 8
_PRIME = 2**61 - 1


class PagedFake:
    """`step_s`: how long a step takes, whatever is in it."""

    def __init__(
        self,
        text: TextFiles,
        *,
        name: str = "fake",
        context_tokens: int = 2048,
        num_blocks: int = 512,
        max_running: int = 64,
        step_tokens: int = 512,
        step_s: float = 0.0,
    ) -> None:
        self.name, self.text = name, text
        self._tokens = FakeTokens(text)
        self._grammars = GrammarCompiler(text, self._tokens.num_ids)
        scheduling = SchedulerConfig(num_blocks=num_blocks, max_running=max_running, step_tokens=step_tokens)
        self.scheduler = Scheduler(scheduling, model=name, context_tokens=context_tokens)
        self.context_tokens = self.scheduler.context_tokens
        self.vocab, self.max_running = self._tokens.num_ids, max_running
        self.block_bytes, self.num_blocks = BLOCK_TOKENS * _SLOT_BYTES, num_blocks
        self.weight_bytes, self.kv_bytes = 0, num_blocks * self.block_bytes
        self._kv = memoryview(bytearray(self.kv_bytes))
        self._values = self._kv.cast("Q")
        self._step_s = step_s
        self._expected: dict[int, tuple[int, int, bytes]] = {}
        """By a sequence's order: up to which position its hash is known, the hash, and its request's digest."""

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def started(self) -> list[str]:
        return [seq.request.id for seq in self.scheduler.prefill.started if seq.leader is None]

    def stats(self) -> ServingStats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        running = len(scheduler.prefill.running) + len(scheduler.decode.running)
        usage = pool.num_held / pool.num_blocks
        return ServingStats(running=running, waiting=len(scheduler.prefill.waiting), kv_usage=usage)

    @property
    def num_held_blocks(self) -> int:
        return self.scheduler.pool.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens

    def add(self, request: Request, answered: Mapping[int, Sequence[int]] | None = None) -> None:
        self._tokens.check(request)
        guides = None
        if request.params.structure is not None:
            known = answered or dict.fromkeys(range(request.params.n), ())
            guides = [self._guide(request, tokens) for tokens in known.values()]
        self.scheduler.add(request, guides, answered)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def step(self) -> list[TokenEvent]:
        tasks = self.scheduler.schedule()
        if self._step_s:
            time.sleep(self._step_s)
        for task in tasks:
            self._compute(task)
        events = self.scheduler.settle(tasks, [self._sample(task) if task.samples else None for task in tasks])
        if len(self._expected) > 4 * self.num_blocks:
            live = {seq.order for seq in self.scheduler.holders()}
            self._expected = {order: known for order, known in self._expected.items() if order in live}
        return events

    def detach(self, request_id: str, choice: int) -> Seq:
        return self.scheduler.detach(request_id, choice)

    def release(self, seq: Seq) -> None:
        self.scheduler.release(seq)

    def adopt(
        self,
        request: Request,
        choice: int,
        answer: Sequence[int],
        num_computed: int,
        *,
        num_cached: int = 0,
        shared: Sequence[int] = (),
    ) -> Seq | None:
        if not self.scheduler.can_adopt(num_computed + 1, len(shared)):
            return None
        guide = self._guide(request, answer) if request.params.structure is not None else None
        return self.scheduler.adopt(
            request, choice, answer, num_computed, num_cached=num_cached, guide=guide, shared=shared
        )

    def start(self, seq: Seq) -> None:
        self.scheduler.start(seq)

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        return self.scheduler.keep(keys)

    def keep_more(self, blocks: list[int], count: int) -> None:
        self.scheduler.keep_more(blocks, count)

    def let_go(self, blocks: list[int], keys: Sequence[bytes] = ()) -> None:
        self.scheduler.let_go(blocks, keys)

    def export_block(self, block: int, into: memoryview) -> None:
        into[:] = self._kv[block * self.block_bytes : (block + 1) * self.block_bytes]

    def import_block(self, block: int, data: memoryview) -> None:
        self._kv[block * self.block_bytes : (block + 1) * self.block_bytes] = data

    def _guide(self, request: Request, answer: Sequence[int]) -> Guide:
        assert request.params.structure is not None
        guide = self._grammars.guide(request.params.structure, request.stop_ids)
        for token_id in answer:
            guide.accept(token_id)
        return guide

    def _compute(self, task: Task) -> None:
        work = task.work
        value = self._values[_slot(work.table, work.start - 1)] if work.start else 0
        for position, token_id in enumerate(work.tokens, work.start):
            value = _after(value, token_id)
            self._values[_slot(work.table, position)] = value

    def _sample(self, task: Task) -> Sampled:
        seq = task.seq
        request = seq.request
        value, digest = self._hash(seq)
        sampled = self._tokens.choose(request, digest, seq.choice, seq.num_generated, seq.guide)
        right = self._values[_slot(task.work.table, task.work.stop - 1)] == value
        if seq.guide is None and (not right or self._ends_too_early(seq, sampled.token_id)):
            plain = (i % self.vocab for i in range(sampled.token_id + 1, sampled.token_id + self.vocab))
            return Sampled(next(i for i in plain if i not in seq.stop_ids | request.end_ids), sampled.logprobs)
        assert right, "a block is not what it should be"
        return sampled

    def _ends_too_early(self, seq: Seq, token_id: int) -> bool:
        return seq.num_generated < seq.request.params.min_tokens and token_id in seq.stop_ids

    def _hash(self, seq: Seq) -> tuple[int, bytes]:
        """Of all its tokens, from where it was known last; and the digest that its answer is made from."""
        position, value, digest = self._expected.get(seq.order) or (0, 0, self._tokens.digest(seq.request))
        for token_id in seq.tokens[position:]:
            value = _after(value, token_id)
        self._expected[seq.order] = len(seq.tokens), value, digest
        return value, digest


def _slot(table: Sequence[int], position: int) -> int:
    return table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _after(value: int, token_id: int) -> int:
    return (value * 1_000_003 + token_id + 1) % _PRIME
