"""Draft switch: decides by measured time per token whether steps verify drafts, or overlap without them. Pure.

Drafts give some sequences a second token, but make a step longer and keep the host between two steps. Which kind of
step is faster depends on the model, the device, the text and, most of all, on the number of sequences. So both kinds
are timed, for each power of two of sequences, and the faster one runs. The other one is tried again now and then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

_STEPS = 24
"""Of one kind that are measured before it is compared with the other."""
_STAY = 32
"""Fewest steps between two changes: after one, steps do not overlap once, and the next drafts are worse."""
_AGAIN = 4096
"""Steps until the slower kind is tried again: texts and contexts change."""
_GAIN = 0.03
"""The other kind must be faster by this share."""


@dataclass(slots=True)
class _Times:
    """The last steps of one kind."""

    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    num_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_STEPS))
    num_others: int = 0
    """Steps of the other kind since the last of these."""

    @property
    def known(self) -> bool:
        return len(self.step_s) == _STEPS and self.num_others < _AGAIN

    @property
    def token_s(self) -> float:
        """By the median step: the first step of a size may take a thousand times as long."""
        return median(self.step_s) * len(self.num_tokens) / sum(self.num_tokens)


class DraftSwitch:
    def __init__(self) -> None:
        self._drafts = True
        self._num_steps = 0
        """Since the last change."""
        self._times: defaultdict[tuple[int, bool], _Times] = defaultdict(_Times)
        """By the rough number of sequences, and whether with drafts."""

    def choose(self, num_seqs: int) -> bool:
        """Whether the next step of so many decoding sequences verifies drafts."""
        own, other = (self._times[num_seqs.bit_length(), drafts] for drafts in (self._drafts, not self._drafts))
        settled = self._num_steps >= _STAY and own.known
        if settled and not (other.known and other.token_s > (1 - _GAIN) * own.token_s):
            self._drafts, self._num_steps = not self._drafts, 0
        return self._drafts

    def measured(self, num_seqs: int, num_tokens: int, step_s: float) -> None:
        """A step of decoding sequences and nothing else gave so many tokens, so long after the one before it."""
        assert num_tokens > 0
        self._num_steps += 1
        own = self._times[num_seqs.bit_length(), self._drafts]
        own.step_s.append(step_s)
        own.num_tokens.append(num_tokens)
        own.num_others = 0
        self._times[num_seqs.bit_length(), not self._drafts].num_others += 1
