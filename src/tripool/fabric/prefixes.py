"""A worker's use of the cache pool: fetches known prefixes before a prompt is computed, publishes new blocks after.

The pool is a help, never a need. What it does not know, cannot give in time or gives damaged is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from tripool.cache.copying import Staging
from tripool.cache.keys import namespace_ranges
from tripool.core import Request
from tripool.engine_protocol import PoolEngine

PROMPT_FORM, DECODE_FORM = 0, 1
"""Which code path computed a block; the last bits may differ."""
_MAX_PUBLISHING = 64
"""Finished answers that wait to be published; more than that are not worth the blocks they hold."""


class FoundPrefix(Protocol):
    """Blocks that a pool holds, readable within the `with` statement."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def from_disk(self) -> Sequence[bool]: ...

    def read(self, into: Sequence[Any]) -> int:
        """Fill these buffers, one per block; returns how many hold their block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class PrefixPool(Protocol):
    """What is needed of a client of the cache pool: see `tripool.cache.client.PoolClient`."""

    def find(self, keys: Sequence[bytes], *, namespace: str, first: int = 0) -> FoundPrefix: ...

    def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        namespace: str,
        first: int = 0,
        form: int = 0,
        checksums: Sequence[int] = (),
    ) -> int: ...


@dataclass(slots=True, eq=False)
class _Publishing:
    keys: Sequence[bytes]
    blocks: list[int]
    position: int
    form: int
    parts: list[tuple[str, int, int]]
    """Namespaces of its blocks: see `namespace_ranges`."""

    @property
    def namespace(self) -> str:
        """Of the next block."""
        return next(name for name, _, stop in self.parts if self.position < stop)


class Prefixes:
    """Without a pool nothing is found, and nothing is published."""

    def __init__(self, engine: PoolEngine, pool: PrefixPool | None) -> None:
        self._engine, self._pool, self._block_tokens = engine, pool, engine.block_tokens
        self.waiting: deque[_Publishing] = deque()
        """To be published, a little at a time."""
        self._staging = bytearray(engine.block_bytes if pool is not None else 0)
        self._fetched = Staging(engine.block_bytes)

    @property
    def pending(self) -> bool:
        return bool(self.waiting)

    def fetch(self, request: Request) -> tuple[int, int]:
        """Bring what the pool knows of the prompt into the engine's own memory, where it will be found.

        Returns how many tokens that are, and how many of them came from disk.
        """
        if self._pool is None:
            return 0, 0
        self._engine.check(request)  # its blocks are named by its tokens
        keys = self._engine.prompt_keys(request, len(request.prompt_ids) - 1)  # the last token is always computed
        if not keys:
            return 0, 0
        kept = self._engine.keep(keys)
        num_known = num_own = len(kept)
        num_disk = 0
        for namespace, first, stop in self._stretches(request, len(keys)):
            if not first <= num_known < stop:
                continue  # known already, or behind a gap
            with self._pool.find(keys[:stop], namespace=namespace, first=num_known) as prefix:
                self._engine.keep_more(kept, prefix.num_blocks)
                buffers = self._fetched.take(len(kept) - num_known)
                num_read = prefix.read(buffers)
                num_disk += sum(prefix.from_disk[:num_read])
            for block, buffer in zip(kept[num_known:], buffers[:num_read], strict=False):
                self._engine.import_block(block, buffer.data)
            num_known += num_read
        self._engine.let_go(kept, keys[:num_known])
        return (num_known - num_own) * self._block_tokens, num_disk * self._block_tokens

    def publish(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], checksums: Sequence[int], request: Request
    ) -> None:
        """Blocks of a prompt, where a KV sender keeps them: what has changed there since is not published."""
        if self._pool is None:
            return
        for namespace, first, stop in self._stretches(request, len(keys)):
            part, sums = blocks[first:stop], checksums[first:stop]
            self._pool.store(keys[:stop], part, namespace=namespace, first=first, form=PROMPT_FORM, checksums=sums)

    def publish_later(self, request: Request, keys: Sequence[bytes]) -> None:
        """The blocks of a finished answer, which are free already but not forgotten."""
        self._wait(request, keys, len(request.prompt_ids) // self._block_tokens, DECODE_FORM)

    def publish_prompt_later(self, request: Request) -> None:
        """The blocks of a prompt whose answer is over."""
        if self._pool is not None:
            self._wait(request, self._engine.prompt_keys(request, len(request.prompt_ids)), 0, PROMPT_FORM)

    def _wait(self, request: Request, keys: Sequence[bytes], first: int, form: int) -> None:
        if self._pool is not None and first < len(keys) and len(self.waiting) < _MAX_PUBLISHING:
            parts = self._stretches(request, len(keys))
            self.waiting.append(_Publishing(keys, self._engine.keep(keys), first, form, parts))

    def work(self, budget_bytes: int) -> None:
        """Publish a little of what waits."""
        while self.waiting and budget_bytes > 0:
            one = self.waiting[0]
            if one.position < len(one.blocks):
                view = memoryview(self._staging)
                self._engine.export_block(one.blocks[one.position], view)
                assert self._pool is not None
                self._pool.store(one.keys, [view], namespace=one.namespace, first=one.position, form=one.form)
                one.position += 1
                budget_bytes -= len(view)
            if one.position >= len(one.blocks):
                self.waiting.popleft()
                self._engine.let_go(one.blocks)

    def drop(self) -> None:
        while self.waiting:
            self._engine.let_go(self.waiting.popleft().blocks)

    def _stretches(self, request: Request, num_blocks: int) -> list[tuple[str, int, int]]:
        return namespace_ranges(request.namespace, request.public_tokens // self._block_tokens, num_blocks)
