"""The fake engine: the scheduler and the block memory of a real one, and tokens from a hash (`FakeTokens`).

The KV of a position is a hash of the namespace and of all tokens up to it, made from the KV of the position before: a
sequence that runs on a wrong block gets a wrong token, and a test sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

from tripool.config import SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.decode import StepFacts
from tripool.engine.fake import FakeTokens
from tripool.engine.paged import Paged
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Seq, Task
from tripool.text.files import TextFiles

_SLOT_BYTES = 8
_PRIME = 2**61 - 1


class PagedFake(Paged):
    """`step_s`: how long a step takes, whatever is in it; `row_s` and `prompt_token_s`: and for each of these in it.

    `clock` and `wait` stand for time; in a simulation they are virtual.
    """

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
        row_s: float = 0.0,
        prompt_token_s: float = 0.0,
        block_tokens: int = BLOCK_TOKENS,
        prefix_reuse: bool = True,
        tokens: FakeTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tokens = tokens or FakeTokens(text)
        scheduling = SchedulerConfig(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            max_running=max_running,
            step_tokens=step_tokens,
            prefix_reuse=prefix_reuse,
        )
        scheduler = Scheduler(scheduling, model=name, context_tokens=context_tokens)
        vocab = self._tokens.num_ids
        super().__init__(scheduler, text, name=name, vocab=vocab, max_running=max_running, clock=clock)
        self._wait, self.step_tokens = wait, step_tokens
        self.block_bytes = block_tokens * _SLOT_BYTES
        self.weight_bytes, self.kv_bytes = 0, num_blocks * self.block_bytes
        self._kv = memoryview(bytearray(self.kv_bytes))
        self._values = self._kv.cast("Q")
        self._step_s, self._row_s, self._prompt_token_s = step_s, row_s, prompt_token_s
        self._expected: dict[int, tuple[int, int, bytes]] = {}
        """By a sequence's order: up to which position its hash is known, the hash, and its request's digest."""

    @property
    def open_requests(self) -> frozenset[str]:
        """Requests that are neither finished nor cancelled."""
        return frozenset(self.scheduler.requests)

    def check(self, request: Request) -> None:
        self._tokens.check(request)

    def draft(self) -> None:
        """It drafts nothing."""

    def compute(self, tasks: list[Task]) -> list[TokenEvent]:
        facts = StepFacts.of(tasks)
        step_s = self._step_s + self._row_s * facts.rows + self._prompt_token_s * facts.prompt_tokens
        if step_s:
            self._wait(step_s)
        for task in tasks:
            self._compute(task)
        sampled = [self.guarded(task.seq, partial(self._sample, task)) if task.samples else None for task in tasks]
        events = self.settle_each(tasks, sampled)
        if len(self._expected) > 4 * self.num_blocks:
            live = {seq.order for seq in self.scheduler.holders()}
            self._expected = {order: known for order, known in self._expected.items() if order in live}
        return events

    def export_block(self, block: int, into: memoryview) -> None:
        into[:] = self._kv[block * self.block_bytes : (block + 1) * self.block_bytes]

    def import_block(self, block: int, data: memoryview) -> None:
        self._kv[block * self.block_bytes : (block + 1) * self.block_bytes] = data

    def _compute(self, task: Task) -> None:
        work, size, values = task.work, self.block_tokens, self._values
        table, position = work.table, work.start
        before = values[self._slot(table, position - 1)] if position else 0
        for value in self._hashes(task.seq.request, before, position, work.tokens):
            values[table[position // size] * size + position % size] = value
            position += 1

    def _hashes(self, request: Request, value: int, position: int, tokens: Sequence[int]) -> list[int]:
        """The KV of consecutive positions; `value` is that of the position before. The namespace comes in behind the
        public blocks."""
        private = request.public_tokens // self.block_tokens * self.block_tokens
        hashes = []
        for at, token_id in enumerate(tokens, position):
            if at == private and request.namespace:
                value = _after(value, crc32(request.namespace.encode()))
            value = _after(value, token_id)
            hashes.append(value)
        return hashes

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _sample(self, task: Task) -> Sampled:
        seq = task.seq
        request = seq.request
        value, digest = self._hash(seq)
        if seq.scores_prompt:
            seq.prompt_scores = self._tokens.prompt_scores(request)
        sampled = self._tokens.choose(request, digest, seq.choice, seq.num_generated, seq.guide)
        right = self._values[self._slot(task.work.table, task.work.stop - 1)] == value
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
        if position < len(seq.tokens):
            value = self._hashes(seq.request, value, position, seq.tokens[position:])[-1]
        self._expected[seq.order] = len(seq.tokens), value, digest
        return value, digest


def _after(value: int, token_id: int) -> int:
    return (value * 1_000_003 + token_id + 1) % _PRIME
