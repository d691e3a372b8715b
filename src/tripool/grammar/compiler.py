"""Compiles structures for one model, and remembers the last ones. Bad grammars become InvalidRequest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar.guide import Guide
from tripool.grammar.owned import OwnedCache
from tripool.grammar.translate import LIMITS, grammar_text
from tripool.grammar.vocabulary import read_vocabulary
from tripool.text.files import TextFiles

MAX_KEPT = 16
"""Of each tenant."""
_MAX_TENANTS = 64
MAX_MESSAGE_CHARS = 500


class GrammarCompiler:
    """Not thread-safe: an engine owns one. The vocabulary is read at the first use, as most requests need none."""

    def __init__(self, text: TextFiles, num_ids: int) -> None:
        """`num_ids` is the model's, which may be more than its tokenizer's."""
        self._text = text
        self._num_ids = num_ids
        self._compiled: OwnedCache[LLMatcher] = OwnedCache(per_tenant=MAX_KEPT, max_tenants=_MAX_TENANTS)

    def guide(self, structure: Structure, ends: Iterable[int], namespace: str = "") -> Guide:
        """For one answer. `ends`: the tokens that end it; `namespace`: whose it is."""
        guide = Guide(self._matcher(structure, namespace).deep_copy(), self._num_ids, ends)
        if guide.spent:
            hint = "no text can satisfy it" if not guide.done else "it allows the empty text only"
            raise InvalidRequest(
                f"the {structure.kind} leaves nothing to generate{guide.error and ': '}"
                f"{guide.error[:MAX_MESSAGE_CHARS]}",
                hint=hint,
                param=structure.param,
            )
        return guide

    def _matcher(self, structure: Structure, namespace: str) -> LLMatcher:
        """In its initial state, to be copied."""
        known = self._compiled.get(namespace, structure)
        if known is not None:
            return known
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        matcher = LLMatcher(self._vocabulary, grammar_text(structure), log_level=0, limits=limits)
        if matcher.is_error():
            message = f"the {structure.kind} cannot be used: {matcher.get_error()[:MAX_MESSAGE_CHARS]}"
            raise InvalidRequest(message, param=structure.param)
        self._compiled.put(namespace, structure, matcher)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return read_vocabulary(self._text, self._num_ids)
