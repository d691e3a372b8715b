"""The state of one answer in a compiled grammar: which tokens are allowed next."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from tripool.grammar.compiled import Compiled, unpacked


class Guide:
    """`ends` are the tokens that end this answer. They are allowed exactly when the text so far is complete.

    llguidance may give up in the middle of an answer: it limits the cost of a state, and no trial covers all states.
    Then the guide is spent and not done: the answer ends there. A caller that asks for one more token all the same (a
    replay that gave up where the first run did not) is given an end, if there is one.

    A token that ends the answer and could also be text (a stop token of the caller's) is an end, so that the text cut
    off by it is complete; it is text only where nothing else is allowed.

    Creating one is cheap: the matcher is copied, and given the known tokens, at the first use.
    """

    def __init__(self, compiled: Compiled, ends: Iterable[int], known: Sequence[int] = ()) -> None:
        """`known`: tokens that the answer already has. They did not end it."""
        self._compiled = compiled
        self._all_ends = ends
        self._known = known
        self._copy: LLMatcher | None = None
        """This guide's own copy, once needed."""
        self._ended = False
        self._allowed: NDArray[np.bool_] | None = None
        """The mask after the tokens so far, once computed."""
        self._may_end = False
        self._done = False
        self.mask_s = compiled.mask_s
        """CPU time of the newest mask, including the work it required first; before there is one, that of the first
        mask when it was compiled."""

    def mask(self) -> NDArray[np.bool_]:
        """[num_ids], read-only: the tokens allowed next. None after an end."""
        if self._allowed is None:
            began_s = time.thread_time()
            self._allowed = self._compute()
            if self._copy is not None:
                self.mask_s = time.thread_time() - began_s
        return self._allowed

    def accept(self, token_id: int) -> None:
        allowed = self.mask()
        if not self._gave_up:
            assert allowed[token_id], f"token {token_id} is not allowed here"
            if self._may_end and token_id in self._ends:
                self._ended = True
            else:
                self._matcher.consume_token(token_id)  # False: it gave up, and `_gave_up` says so
        self._allowed = None

    @property
    def done(self) -> bool:
        """Complete: only an end can follow."""
        self.mask()
        return self._done

    @property
    def spent(self) -> bool:
        """Nothing may follow: done without an end token, or stopped by one of llguidance's limits."""
        allowed = self.mask()
        return self._gave_up or not allowed.any()

    @property
    def error(self) -> str:
        """Why the grammar gave up; empty when it did not."""
        return self._matcher.get_error()

    @property
    def _gave_up(self) -> bool:
        return self._copy is not None and self._copy.is_error()

    @property
    def _matcher(self) -> LLMatcher:
        """No masks are computed for known tokens: they are not sampled."""
        if self._copy is None:
            self._copy = copy = self._compiled.matcher.deep_copy()
            for token_id in self._known:
                if copy.is_error() or not copy.consume_token(token_id):
                    break
        return self._copy

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(end for end in self._all_ends if end < self._compiled.num_ids)

    @cached_property
    def _end_index(self) -> NDArray[np.int64]:
        return np.array(sorted(self._ends), dtype=np.int64)

    def _compute(self) -> NDArray[np.bool_]:
        num_ids = self._compiled.num_ids
        if self._ended:
            self._may_end, self._done = True, True
            return np.zeros(num_ids, dtype=np.bool_)
        fresh = self._copy is None and not self._known
        packed = self._compiled.first if fresh else self._matcher.compute_bitmask()
        if self._gave_up:
            self._may_end, self._done = False, False
            ends = np.full(num_ids, not self._ends, dtype=np.bool_)
            ends[self._end_index] = True
            return ends
        bits = unpacked(packed, num_ids)
        self._may_end = bool(bits[-1])
        allowed = bits[:-1]
        text = allowed.copy() if self._ends else allowed
        allowed[self._end_index] = self._may_end
        self._done = self._may_end and not text.any()
        return allowed if allowed.any() else text
