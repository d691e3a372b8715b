"""Observed loads of experts: counts of routed rows in windows of tokens, older windows decayed."""

from __future__ import annotations

import numpy as np

from tripool.experts.placement import Counts, Loads


class LoadWindow:
    """Fed with the rows that each expert received; its `loads` are what `balance` takes.

    A window closes after `tokens` tokens; with every close, all that was seen before counts `decay` times as much. So
    the memory is about 1 / (1 - decay) windows: a longer one averages out chance, a shorter one follows drift sooner.
    """

    def __init__(self, layers: int, experts: int, *, tokens: int = 1000, decay: float = 0.6) -> None:
        assert tokens > 0 and 0.0 <= decay < 1.0
        self._window_tokens, self._decay = tokens, decay
        self._closed = np.zeros((layers, experts))
        self._open = np.zeros((layers, experts))
        self._open_tokens = 0
        self.windows = 0
        """Windows closed so far."""

    @property
    def loads(self) -> Loads:
        """(layers, experts): the decayed counts, the open window included."""
        return self._closed + self._open

    def add(self, counts: Counts, tokens: int) -> bool:
        """Take the counts (layers, experts) of a step over so many tokens; True when that closes a window."""
        self._open += counts
        self._open_tokens += tokens
        if self._open_tokens < self._window_tokens:
            return False
        self._closed = self._closed * self._decay + self._open
        self._open = np.zeros_like(self._open)
        self._open_tokens = 0
        self.windows += 1
        return True
