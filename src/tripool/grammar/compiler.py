"""Compiles structures for one model and caches the latest. An invalid grammar becomes an InvalidRequest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tripool.core import Structure, owner
from tripool.errors import InvalidRequest
from tripool.grammar.compiled import Compiled, Refusal
from tripool.grammar.guide import Guide
from tripool.grammar.owned import OwnedCache
from tripool.grammar.translate import LIMITS, grammar_text, in_words
from tripool.text import Tokenizer
from tripool.text.files import TextFiles

T = TypeVar("T")


class CompilePool(Generic[T]):
    """Compiles grammars in a thread of its own, one per tenant in turn; llguidance releases the GIL meanwhile.

    Thread-safe. The thread ends when nothing is left to do, so it needs no close.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[T], Callable[[], T]]]] = {}
        """By tenant, the next one first."""
        self._working = False

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, work))
            if not self._working:
                self._working = True
                threading.Thread(target=self._run, name="tripool-grammars", daemon=True).start()
        return future

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            future, work = taken
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 (not swallowed: raised again where the result is asked for)
                future.set_exception(error)
            else:
                future.set_result(result)

    def _next(self) -> tuple[Future[T], Callable[[], T]] | None:
        with self._lock:
            while self._waiting:
                tenant = next(iter(self._waiting))
                queue = self._waiting.pop(tenant)
                future, work = queue.popleft()
                if queue:
                    self._waiting[tenant] = queue  # after the others
                if future.set_running_or_notify_cancel():
                    return future, work
            self._working = False
            return None


# Ids that no text of a grammar uses are hidden from llguidance: special tokens, ends, and ids beyond the tokenizer. It
# has one end of its own behind the last real id, because the ends of an answer differ from request to request.
def read_vocabulary(text: TextFiles, num_ids: int) -> LLTokenizer:
    """Ids 0 to `num_ids` - 1 and, after them, llguidance's end. Takes about 5 µs per id."""
    spelling = _Spelling(text, num_ids)
    vocabulary = LLTokenizer(TokenizerWrapper(spelling), eos_token=num_ids)
    spelling.vocabulary = vocabulary
    return vocabulary


class _Spelling:
    """The interface that `TokenizerWrapper` expects, under its names."""

    def __init__(self, text: TextFiles, num_ids: int) -> None:
        self._tokenizer = Tokenizer(text)
        self._bans = self._tokenizer.special_ids | text.end_ids
        self.eos_token_id = num_ids
        self.bos_token_id = None
        self.tokens = [self._tokenizer.token_bytes(token_id) for token_id in range(num_ids)] + [b""]
        self.special_token_ids = sorted({i for i in self._bans if i < num_ids} | {num_ids})
        self.vocabulary: LLTokenizer | None = None

    def __call__(self, raw: bytes) -> list[int]:
        """The model's own tokenization of a text that the grammar forces.

        Some tokenizers cannot give it: they read "<|end|>" as a special token, or put a space in front of every text.
        """
        ids = self._tokenizer.encode(raw.decode(), special=False)
        known = all(i < len(self.tokens) and i not in self._bans for i in ids)
        if not known or b"".join(self.tokens[i] for i in ids) != raw:
            assert self.vocabulary is not None
            return self.vocabulary.greedy_tokenize(raw.decode())
        return ids


MAX_KEPT = 16
"""Cached grammars per tenant, besides those in use."""
_MAX_TENANTS = 64
MAX_MESSAGE_CHARS = 500

Outcome = Compiled | Refusal
_Key = tuple[str, Structure]
"""Tenant and structure."""


class GrammarCompiler:
    """Thread-safe. The vocabulary is read at the first use, as most requests need none.

    A caller that must not block calls `prepare` first and holds the result until its guides are made: what is
    referenced stays cached. Otherwise `guide` compiles by itself.
    """

    def __init__(self, text: TextFiles, num_ids: int) -> None:
        """`num_ids`: of the model, which may have more than its tokenizer."""
        self._text = text
        self._num_ids = num_ids
        self._pool: CompilePool[Outcome] = CompilePool()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._cache: OwnedCache[Outcome] = OwnedCache(per_tenant=MAX_KEPT, max_tenants=_MAX_TENANTS)
        self._used: WeakValueDictionary[_Key, Outcome] = WeakValueDictionary()
        self._under_way: dict[_Key, Future[Outcome]] = {}

    def prepare(self, structure: Structure, namespace: str = "") -> Future[Outcome]:
        """Compile it in another thread. The future never raises for an invalid grammar: `guide` does."""
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
        """For one answer. `ends`: tokens that end it; `namespace`: its owner; `known`: tokens it already has."""
        return self.guides(structure, frozenset(ends), [known], namespace)[0]

    def guides(
        self, structure: Structure, ends: frozenset[int], known: Iterable[Sequence[int]], namespace: str = ""
    ) -> list[Guide]:
        """One for each answer in `known`, for the cost of one lookup."""
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
        return self._cache.get(namespace, structure) or self._used.get((owner(namespace), structure))

    def _compile(self, namespace: str, structure: Structure) -> Outcome:
        key = owner(namespace), structure
        outcome: Outcome | None = None
        try:
            outcome = self._compiled(structure)
        finally:
            with self._lock:
                self._under_way.pop(key, None)
                if outcome is not None:
                    self._cache.put(namespace, structure, outcome)
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
            reason = in_words(matcher.get_error(), structure)[:MAX_MESSAGE_CHARS]
            return Refusal(f"the {structure.kind} cannot be used: {reason}", "")
        return Compiled(matcher, self._num_ids)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return read_vocabulary(self._text, self._num_ids)
