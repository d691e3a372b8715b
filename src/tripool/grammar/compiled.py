"""A grammar that is compiled for one model, in its initial state: what all answers under it begin with."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class Compiled:
    """`matcher` is to be copied, never to be used. Its first mask is computed once, not once for every answer."""

    def __init__(self, matcher: LLMatcher, num_ids: int) -> None:
        """Over a vocabulary of `num_ids` ids and an end behind them."""
        self.matcher, self.num_ids = matcher, num_ids
        looking = matcher.deep_copy()  # what a mask makes a matcher remember would be copied with it
        began_s = time.thread_time()
        self.first = looking.compute_bitmask()
        self.mask_s = time.thread_time() - began_s
        """How long that took of the processor."""
        self.error: str = looking.get_error()

    @cached_property
    def _first_bits(self) -> NDArray[np.bool_]:
        return unpacked(self.first, self.num_ids)

    def wrong_with(self, ends: Iterable[int]) -> tuple[str, str] | None:
        """Why no answer that may end with `ends` can have a token: the reason, if it is known, and a hint."""
        bits = self._first_bits
        may_end = bool(bits[-1])
        if not self.error and (bits[:-1].any() or (may_end and any(end < self.num_ids for end in ends))):
            return None
        return self.error, "it allows the empty text only" if may_end and not self.error else "no text can satisfy it"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Refusal:
    """What takes the place of a grammar that does not compile."""

    message: str
    hint: str


def unpacked(packed: bytes, num_ids: int) -> NDArray[np.bool_]:
    """[num_ids + 1], the caller's own: which tokens may come, and whether the end may."""
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=num_ids + 1, bitorder="little")
    return bits.view(np.bool_)
