"""One answer on its way through a compiled grammar: what may come next, token by token."""

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

    llguidance may give up in the middle of an answer: its limits are on what a state costs, and no trial sees them all.
    Then the guide is spent and not done: the answer ends where it is. Whoever asks for one more token all the same (a
    replay that gave up where the first run did not) is given an end, if there is one.

    A token that ends the answer and could also be text (a stop token the caller chose) is an end, so that what was cut
    off by it is complete; only where it is the one way on does it stay.

    Making one costs nothing: the matcher is copied, and told what is known already, when it is needed first.
    """

    def __init__(self, compiled: Compiled, ends: Iterable[int], known: Sequence[int] = ()) -> None:
        """`known`: tokens that the answer has already. It did not end with them."""
        self._compiled = compiled
        self._all_ends = ends
        self._known = known
        self._copy: LLMatcher | None = None
        """This guide's own, once it was needed."""
        self._ended = False
        self._allowed: NDArray[np.bool_] | None = None
        """The mask after the tokens so far, once it was asked for."""
        self._may_end = False
        self._done = False
        self.mask_s = compiled.mask_s
        """How long the newest mask kept the processor busy, and what had to be done for it first; before there is one,
        what the first took when it was compiled."""

    def mask(self) -> NDArray[np.bool_]:
        """[num_ids], not to be changed: the tokens that may come next. None may after an end."""
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
        """Complete: nothing but an end can follow."""
        self.mask()
        return self._done

    @property
    def spent(self) -> bool:
        """Nothing may follow: done without an end to say so, or lost in one of llguidance's limits."""
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
        """Without a mask for what is known: nobody chooses there."""
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
