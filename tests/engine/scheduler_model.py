"""The made-up model of the simulation, and what an undisturbed run of a request gives: known from the request alone.

The model's KV is a *chain value* per position: a hash of the namespace and of every token up to there. The next token
is derived from the last one, so whoever reads a wrong block gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

from tripool.core import Request
from tripool.sequence import Task

VOCAB = 5


def chain_root(namespace: str) -> int:
    return crc32(namespace.encode())


def chain_next(value: int, token: int) -> int:
    return hash((value, token))


def next_token(value: int, request: Request, choice: int, index: int) -> int:
    """A pure function of what was read and of (request, choice, index). Like the sampler, it honours `min_tokens`."""
    token = hash((value, request.seed, choice, index)) % VOCAB
    while index < request.params.min_tokens and token in enders(request):
        token = (token + 1) % VOCAB
    return token


def enders(request: Request) -> set[int]:
    return set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else set(request.end_ids))


@dataclass(eq=False)
class Shadow:
    """What one sequence must do. `tokens` and `chain` already hold the whole future: prompt and full answer."""

    request: Request
    choice: int
    max_new_tokens: int
    leader: Shadow | None
    deadline: int
    """Step by which it must be over, whatever else arrives."""
    tokens: list[int] = field(init=False)
    chain: list[int] = field(init=False)
    num_computed: int = 0
    num_events: int = 0
    num_cached: int | None = None
    answering: bool = False
    """It has given a token since it was last admitted: prompt and replay are behind it."""
    over: bool = False
    cancelled: bool = False
    draft: int | None = None
    """The guess at its next token that the scheduler was told and has not used yet."""
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.chain = []
        value = chain_root(self.request.namespace)
        for token in self.tokens:
            value = chain_next(value, token)
            self.chain.append(value)
        for index in range(self.max_new_tokens):
            token = next_token(value, self.request, self.choice, index)
            value = chain_next(value, token)
            self.tokens.append(token)
            self.chain.append(value)
            if token in enders(self.request):
                break

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_known(self) -> int:
        return self.prompt_len + self.num_events

    @property
    def next_token(self) -> int:
        return self.tokens[self.num_known]

    @property
    def wants_draft(self) -> bool:
        """Two more tokens may come, and the newest one is all that is left to compute."""
        waits = self.num_computed == self.num_known - 1 >= self.prompt_len
        return waits and not self.over and self.num_events + 2 <= self.max_new_tokens

    @property
    def most_rows(self) -> int:
        """Rows to compute from nothing to the end, if the answer is as long as it may be. The last token needs none."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def may_start(self) -> bool:
        leader = self.leader
        return leader is None or leader.over or leader.num_computed >= leader.prompt_len


class Memory:
    """Per block: slot -> chain value. A block that changes hands is wiped: nobody may count on what was there."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._slots: list[dict[int, int]] = [{} for _ in range(num_blocks)]
        self._size = block_tokens

    def wipe(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._slots[block].clear()

    def run(self, task: Task, shadow: Shadow) -> tuple[int, int]:
        """The made-up model. Chain values at the last token that is certain, and at the draft after it, if any."""
        rows, size = task.rows, self._size
        value = certain = chain_root(shadow.request.namespace)
        if rows.start:
            value = self._slots[rows.table[(rows.start - 1) // size]][(rows.start - 1) % size]
        for position, token in enumerate(rows.tokens, rows.start):
            value = chain_next(value, token)
            self._slots[rows.table[position // size]][position % size] = value
            certain = value if position < task.work.stop else certain
        return certain, value

    def check(self, task: Task, shadow: Shadow) -> None:
        """Every slot below a task's first row holds that position of that sequence in that namespace."""
        work, size = task.work, self._size
        assert len(work.table) * size >= task.rows.stop, "no block for a row"
        for position in range(work.start):
            slots = self._slots[work.table[position // size]]
            assert slots.get(position % size) == shadow.chain[position], f"position {position} shows foreign KV"


def known_prefix(shadow: Shadow, names: dict[int, int], block_tokens: int) -> list[int]:
    """Blocks of the longest prefix found in `names` (chain value -> block); one known token is left to compute."""
    found: list[int] = []
    for end in range(block_tokens, shadow.num_known, block_tokens):
        if shadow.chain[end - 1] not in names:
            break
        found.append(names[shadow.chain[end - 1]])
    return found


def steps_to_live(oldest: Shadow, holders: list[Shadow]) -> int:
    """No more than this many steps may begin while the oldest live sequence is still there.

    Each step the oldest holder computes at least a row, and it is never preempted. While the oldest sequence waits,
    nobody is admitted before it: in the worst case the holders finish one after the other, then it runs alone.
    """
    rows = oldest.most_rows - oldest.num_computed
    if oldest not in holders:
        rows += sum(shadow.most_rows - shadow.num_computed for shadow in holders)
    return rows + 1  # it is still there when its last step has begun
