"""Compiles structures for one model, and remembers the last ones. Bad grammars become InvalidRequest."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar.compiled import Compiled, Refusal
from tripool.grammar.guide import Guide
from tripool.grammar.owned import OwnedCache, owner
from tripool.grammar.pool import CompilePool
from tripool.grammar.translate import LIMITS, grammar_text
from tripool.grammar.vocabulary import read_vocabulary
from tripool.text.files import TextFiles

MAX_KEPT = 16
"""Of each tenant, besides those in use."""
_MAX_TENANTS = 64
MAX_MESSAGE_CHARS = 500

Outcome = Compiled | Refusal
_Key = tuple[str, Structure]
"""Whose, and what."""


class GrammarCompiler:
    """Thread-safe. The vocabulary is read at the first use, as most requests need none.

    Whoever must not wait asks for `prepare` first and keeps what it is given until its guides are made: what somebody
    holds is not forgotten. Without that, `guide` compiles by itself.
    """

    def __init__(self, text: TextFiles, num_ids: int) -> None:
        """`num_ids` is the model's, which may be more than its tokenizer's."""
        self._text = text
        self._num_ids = num_ids
        self._pool: CompilePool[Outcome] = CompilePool()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._kept: OwnedCache[Outcome] = OwnedCache(per_tenant=MAX_KEPT, max_tenants=_MAX_TENANTS)
        self._used: WeakValueDictionary[_Key, Outcome] = WeakValueDictionary()
        self._under_way: dict[_Key, Future[Outcome]] = {}

    def prepare(self, structure: Structure, namespace: str = "") -> Future[Outcome]:
        """Have it compiled, in another thread. The future never holds what is wrong with a grammar: `guide` tells."""
        key = owner(namespace), structure
        with self._lock:
            future = self._under_way.get(key)
            if future is not None:
                return future
            known = self._known(namespace, structure)
            if known is None:
                future = self._under_way[key] = self._pool.submit(key[0], partial(self._compile, namespace, structure))
        if known is not None:
            future = Future()
            future.set_result(known)
        assert future is not None
        return future

    def guide(self, structure: Structure, ends: Iterable[int], namespace: str = "", known: Sequence[int] = ()) -> Guide:
        """For one answer. `ends`: the tokens that end it; `namespace`: whose it is; `known`: what it begins with."""
        return self.guides(structure, frozenset(ends), [known], namespace)[0]

    def guides(
        self, structure: Structure, ends: frozenset[int], known: Iterable[Sequence[int]], namespace: str = ""
    ) -> list[Guide]:
        """One for each answer in `known`. Costs no more than one look at the grammar, however many they are."""
        with self._lock:
            outcome = self._known(namespace, structure)
        if outcome is None:
            outcome = self._compile(namespace, structure)
        if isinstance(outcome, Refusal):
            raise InvalidRequest(outcome.message, hint=outcome.hint, param=structure.param)
        wrong = outcome.wrong_with(ends)
        if wrong is not None:
            reason, hint = wrong
            message = f"the {structure.kind} leaves nothing to generate{reason and ': '}{reason[:MAX_MESSAGE_CHARS]}"
            raise InvalidRequest(message, hint=hint, param=structure.param)
        return [Guide(outcome, ends, tokens) for tokens in known]

    def _known(self, namespace: str, structure: Structure) -> Outcome | None:
        return self._kept.get(namespace, structure) or self._used.get((owner(namespace), structure))

    def _compile(self, namespace: str, structure: Structure) -> Outcome:
        key = owner(namespace), structure
        outcome: Outcome | None = None
        try:
            outcome = self._compiled(structure)
        finally:
            with self._lock:
                self._under_way.pop(key, None)
                if outcome is not None:
                    self._kept.put(namespace, structure, outcome)
                    self._used[key] = outcome
        return outcome

    def _compiled(self, structure: Structure) -> Outcome:
        try:
            text = grammar_text(structure)
        except InvalidRequest as error:
            return Refusal(error.message, error.hint)
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            return Refusal(f"the {structure.kind} cannot be used: {matcher.get_error()[:MAX_MESSAGE_CHARS]}", "")
        return Compiled(matcher, self._num_ids)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return read_vocabulary(self._text, self._num_ids)
