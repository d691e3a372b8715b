"""A grammar compiled for one model, in its initial state, shared by all answers under it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class Compiled:
    """`matcher` is only copied, never advanced. Its first mask is computed once, not for every answer."""

    def __init__(self, matcher: LLMatcher, num_ids: int) -> None:
        """For a vocabulary of `num_ids` ids, and one id for the end after them."""
        self.matcher, self.num_ids = matcher, num_ids
        looking = matcher.deep_copy()  # a mask fills caches that would be copied too
        began_s = time.thread_time()
        self.first = looking.compute_bitmask()
        self.mask_s = time.thread_time() - began_s
        """CPU time of the first mask."""
        self.error: str = looking.get_error()

    @cached_property
    def _first_bits(self) -> NDArray[np.bool_]:
        return unpacked(self.first, self.num_ids)

    def wrong_with(self, ends: Iterable[int]) -> tuple[str, str] | None:
        """Why no answer that may end with `ends` can have a token: the reason, if known, and a hint."""
        bits = self._first_bits
        may_end = bool(bits[-1])
        if not self.error and (bits[:-1].any() or (may_end and any(end < self.num_ids for end in ends))):
            return None
        return self.error, "it allows the empty text only" if may_end and not self.error else "no text can satisfy it"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Refusal:
    """Stands in for a grammar that does not compile."""

    message: str
    hint: str


def unpacked(packed: bytes, num_ids: int) -> NDArray[np.bool_]:
    """[num_ids + 1], owned by the caller: which tokens are allowed, and whether the end is."""
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=num_ids + 1, bitorder="little")
    return bits.view(np.bool_)
