"""A made-up language model whose every token depends on all KV before it: wrong memory gives wrong text. Pure.

The KV of a position is one number, stirred from the number before it and the token. A worker's memory holds these by
block and slot, as a device would. What a request must be answered is known beforehand from the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from tripool.core import FinishReason, Request
from tripool.sequence import Task

END_ID = 0
VOCAB = 24
BLOCK_TOKENS = 4
_EMPTY = -1


def root_value(request: Request) -> int:
    """Before the first token. It tells namespaces apart: a block shared between two gives wrong text.

    Public blocks have one root for all; behind them the namespace comes in.
    """
    return 0 if request.public_tokens >= BLOCK_TOKENS else _salt(request)


def salted(value: int, request: Request, position: int) -> int:
    """What the token at a position is stirred into: the value before it, and right behind public blocks the salt."""
    behind = request.public_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return hash((value, _salt(request))) if position and position == behind else value


def _salt(request: Request) -> int:
    return crc32(request.namespace.encode())


def next_value(value: int, token_id: int) -> int:
    return hash((value, token_id))  # of whole numbers: the same in every process


def sample(value: int, request: Request, choice: int, position: int) -> int:
    """Noise is keyed by seed, choice and position alone, as a real sampler's is."""
    return hash((value, request.seed, choice, position)) % VOCAB


def answer(request: Request, choice: int) -> tuple[list[int], FinishReason]:
    """What an undisturbed run gives."""
    value, stop_ids = root_value(request), request.stop_ids
    for position, token_id in enumerate(request.prompt_ids):
        value = next_value(salted(value, request, position) if request.public_tokens else value, token_id)
    tokens: list[int] = []
    limit = request.params.max_tokens
    assert limit is not None
    while True:
        position = len(request.prompt_ids) + len(tokens)
        token_id = sample(value, request, choice, position)
        tokens.append(token_id)
        if token_id in stop_ids:
            return tokens, "stop"
        if len(tokens) == limit:
            return tokens, "length"
        value = next_value(salted(value, request, position) if request.public_tokens else value, token_id)


class Memory:
    """One device's KV."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._size = block_tokens
        self._values = [_EMPTY] * (num_blocks * block_tokens)

    def run(self, task: Task) -> int:
        """Compute a task's rows: read the KV before them, write theirs. Returns the last one's."""
        work, values, size, request = task.work, self._values, self._size, task.seq.request
        table = work.table
        at = work.start - 1
        value = values[table[at // size] * size + at % size] if at >= 0 else root_value(request)
        for token_id in work.tokens:
            at += 1
            value = next_value(salted(value, request, at) if request.public_tokens else value, token_id)
            values[table[at // size] * size + at % size] = value
        return value

    def read(self, block: int) -> tuple[int, ...]:
        return tuple(self._values[block * self._size : (block + 1) * self._size])

    def write(self, block: int, values: Sequence[int]) -> None:
        assert len(values) == self._size
        self._values[block * self._size : (block + 1) * self._size] = values


def checksum(values: Sequence[int]) -> int:
    return hash(tuple(values))
