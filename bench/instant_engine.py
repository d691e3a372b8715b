"""An engine without scheduler and memory: the tokens of the fake engine, at next to no cost.

Tests and `tripool serve fake` run `PagedFake`, which schedules as a real engine does. A benchmark of the gateway must
not measure the time that this takes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tripool.cache import namespace_ranges
from tripool.core import BLOCK_TOKENS, FinishReason, Request, ServingStats, TokenEvent
from tripool.engine.fake import FakeTokens
from tripool.errors import ContextOverflow
from tripool.grammar import GrammarCompiler
from tripool.sequence import Guide
from tripool.text.files import TextFiles

_logger = logging.getLogger("tripool.engine")


@dataclass(slots=True)
class _Running:
    """An open request: how many tokens each unfinished choice has."""

    request: Request
    digest: bytes
    num_cached_tokens: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    guides: Sequence[Guide] | None = None
    """One per choice, when the answers must have a structure."""


class InstantEngine:
    """Token `index` of a choice is a hash of (prompt, seed, choice, index); answers end after 8 to 39 tokens."""

    def __init__(
        self,
        text: TextFiles,
        *,
        name: str = "fake",
        context_tokens: int = 2048,
        max_running: int = 64,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._tokens = FakeTokens(text)
        self._grammars = GrammarCompiler(text, self._tokens.num_ids)
        self.name, self.text = name, text
        self.context_tokens, self.step_tokens = context_tokens, 512
        self.weight_bytes, self.kv_bytes, self.from_weight_cache = 0, 0, False
        self._max_running, self._block_tokens = max_running, block_tokens
        self._open: dict[str, _Running] = {}
        self._known_blocks: set[tuple[str, int, tuple[int, ...]]] = set()
        self.started: list[str] = []
        self._failed: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def open_requests(self) -> frozenset[str]:
        """What still holds a place: empty once every request is finished or cancelled."""
        return frozenset(self._open)

    def prepare(self, request: Request) -> Future[Any] | None:
        structure = request.params.structure
        return None if structure is None else self._grammars.prepare(structure, request.namespace)

    def add(self, request: Request) -> None:
        assert request.id not in self._open, f"request id {request.id} is used twice"
        self._tokens.check(request)
        asked = len(request.prompt_ids) + (request.params.max_tokens or 1)
        if asked > self.context_tokens:
            hint = "shorten the prompt or ask for fewer tokens"
            raise ContextOverflow(f"{asked} tokens exceed the context of {self.context_tokens}", hint=hint)
        guides: Sequence[Guide] | None = None
        structure = request.params.structure
        if structure is not None:
            known: list[tuple[int, ...]] = [()] * request.params.n
            guides = self._grammars.guides(structure, request.stop_ids, known, request.namespace)
        self._open[request.id] = _Running(request, self._tokens.digest(request), guides=guides)

    def cancel(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def stats(self) -> ServingStats:
        """A running choice holds one of `max_running` places, as if it were its KV."""
        opened = list(self._open.values())
        running = sum(len(request.num_tokens) for request in opened)
        waiting = sum(request.request.params.n for request in opened if not request.num_tokens)
        return ServingStats(running=running, waiting=waiting, kv_usage=min(1.0, running / self._max_running))

    def step(self) -> list[TokenEvent]:
        """One token for every unfinished choice of the requests that fit, oldest first."""
        events: list[TokenEvent] = []
        self.started = []
        for running in list(self._open.values()):
            choices = running.num_tokens or dict.fromkeys(range(running.request.params.n), 0)
            if events and len(events) + len(choices) > self._max_running:
                break
            if not running.num_tokens:
                running.num_tokens = choices
                self.started.append(running.request.id)
                running.num_cached_tokens = self._reuse_prefix(running.request)
            try:
                events += [self._advance(running, choice) for choice in list(choices)]
            except Exception:
                _logger.exception("request %s failed", running.request.id)
                self._failed.append(running.request.id)
                running.num_tokens.clear()
            if not running.num_tokens:
                del self._open[running.request.id]
        return events

    def take_failed(self) -> list[str]:
        failed, self._failed = self._failed, []
        return failed

    def _advance(self, running: _Running, choice: int) -> TokenEvent:
        request, index = running.request, running.num_tokens[choice]
        guide = running.guides[choice] if running.guides is not None else None
        sampled = self._tokens.choose(request, running.digest, choice, index, guide)
        if guide is not None:
            guide.accept(sampled.token_id)
        finish = self._finish(request, index, sampled.token_id, guide)
        if finish:
            del running.num_tokens[choice]
        else:
            running.num_tokens[choice] += 1
        cached = running.num_cached_tokens
        return TokenEvent(request.id, choice, index, sampled.token_id, finish, sampled.logprobs, cached)

    def _finish(self, request: Request, index: int, token_id: int, guide: Guide | None) -> FinishReason | None:
        params, num_tokens = request.params, index + 1
        if guide is not None and (token_id in request.stop_ids or guide.spent):
            return "stop" if guide.done else "length"
        ended = token_id in request.end_ids and not params.ignore_eos
        if num_tokens > params.min_tokens and (ended or token_id in params.stop_token_ids):
            return "stop"
        full = len(request.prompt_ids) + num_tokens >= self.context_tokens
        if full or num_tokens == params.max_tokens:
            return "length"
        return None

    def _reuse_prefix(self, request: Request) -> int:
        """Whole blocks already seen in this namespace, or public ones; at least one prompt token is always computed."""
        prompt, size = request.prompt_ids, self._block_tokens
        num_public = request.public_tokens // size
        prefixes = [
            (namespace, first, prompt[: (number + 1) * size])
            for namespace, first, stop in namespace_ranges(request.namespace, num_public, (len(prompt) - 1) // size)
            for number in range(first, stop)
        ]
        cached = next((i for i, prefix in enumerate(prefixes) if prefix not in self._known_blocks), len(prefixes))
        self._known_blocks.update(prefixes)
        return cached * size
