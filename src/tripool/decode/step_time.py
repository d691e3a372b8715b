"""How long a step takes, learned from the steps that ran: a straight line through what it computes and reads. Pure.

A step costs something however little it does (the weights are read once), something per row, per token of context that
rows read, per prompt token. None of these can be negative. They are fitted by least squares over the last two hundred
steps, so a machine that gets slower is noticed; a step that was far off counts for little, so a hiccup is not.

Knows no clock and no promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul, truediv

from tripool.sequence import Task

_SCALES = (1.0, 16.0, 16.0, 8192.0, 256.0, 65536.0)
"""Roughly what a busy step has of each, so that no cost is learned much faster than another."""
_KEEP = 0.995
"""What a step still counts for when the next one comes: the last two hundred decide."""
_SWEEPS = 2
_CALM = 1e-3
"""Keeps what a direction without news had: without this its cost would follow the noise."""
_FIRST_STEPS = 8
"""Until so many are known, none is called an outlier."""
_OUTLIER = 4.0
"""Times the usual error; what is beyond counts less, the farther the less."""
_SPREAD_RATE = 0.05
_MUCH = 0.2
_STRANGE_STEPS = 8
"""So many outliers in a row are no hiccups: it is another machine now, and what is known is taken in proportion."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step computes."""

    rows: int = 0
    """Sequences that take a token."""
    drafts: int = 0
    context_tokens: float = 0
    """Read by the rows, all together."""
    prompt_tokens: int = 0
    prompt_reads: float = 0
    """Context that prompt tokens read: each of them all that is before it."""

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> StepFacts:
        rows = drafts = context = prompt = reads = 0
        for task in tasks:
            work = task.work
            count = len(work.tokens)
            if work.decode:
                rows += count
                drafts += task.draft is not None
                context += count * work.stop
            else:
                prompt += count
                reads += count * (work.start + work.stop) // 2
        return cls(rows, drafts, context, prompt, reads)

    def features(self) -> tuple[float, ...]:
        counts = (1.0, self.rows, self.drafts, self.context_tokens, self.prompt_tokens, self.prompt_reads)
        return tuple(map(truediv, counts, _SCALES))


class StepTime:
    def __init__(self) -> None:
        size = len(_SCALES)
        self._costs = [0.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._spread_s = 0.0
        self._strange: list[float] = []
        """By how many times the last steps were off, while all of them are outliers."""
        self.num_learned = 0
        self.most_rows = 0
        self.most_prompt_tokens = 0
        """The largest that were seen: far beyond them the line is a guess."""

    @property
    def error_s(self) -> float:
        """By how much predictions are off, on average over the last steps; outliers are cut."""
        return self._spread_s

    def predict_s(self, facts: StepFacts) -> float:
        return _dot(self._costs, facts.features())

    @property
    def fixed_s(self) -> float:
        return self._costs[0]

    @property
    def row_s(self) -> float:
        return self._costs[1] / _SCALES[1]

    @property
    def draft_s(self) -> float:
        return self._costs[2] / _SCALES[2]

    @property
    def context_token_s(self) -> float:
        return self._costs[3] / _SCALES[3]

    @property
    def prompt_token_s(self) -> float:
        return self._costs[4] / _SCALES[4]

    @property
    def prompt_read_s(self) -> float:
        return self._costs[5] / _SCALES[5]

    def learn(self, facts: StepFacts, step_s: float) -> None:
        features = facts.features()
        expected_s = _dot(self._costs, features)
        weight = self._judge(abs(step_s - expected_s))
        strange = weight < 1 and abs(step_s - expected_s) > _MUCH * expected_s > 0
        self._strange = [*self._strange, step_s / expected_s] if strange else []
        if len(self._strange) == _STRANGE_STEPS:
            self._start_over(sorted(self._strange)[_STRANGE_STEPS // 2])
        for i, own in enumerate(features):
            share = weight * own
            self._gram[i] = [old * _KEEP + share * other for old, other in zip(self._gram[i], features, strict=True)]
            self._moments[i] = self._moments[i] * _KEEP + share * step_s
        self._fit()
        self.num_learned += 1
        self.most_rows = max(self.most_rows, facts.rows)
        self.most_prompt_tokens = max(self.most_prompt_tokens, facts.prompt_tokens)

    def _judge(self, error_s: float) -> float:
        """How much a step with this error counts. A lasting change widens what is usual, and so counts again soon."""
        if self.num_learned < _FIRST_STEPS:
            self._spread_s = error_s if self.num_learned else 0.0
            return 1.0
        bound_s = _OUTLIER * self._spread_s
        cut_s = min(error_s, 2 * bound_s) if bound_s > 0 else error_s
        self._spread_s += _SPREAD_RATE * (cut_s - self._spread_s)
        return bound_s / error_s if error_s > bound_s > 0 else 1.0

    def _start_over(self, slower: float) -> None:
        """Costs as they were in proportion, and open to news: the steps behind them say nothing any more."""
        self._costs = [cost * slower for cost in self._costs]
        self._spread_s *= max(1.0, slower)
        self._gram = [[0.0] * len(row) for row in self._gram]
        self._moments = [0.0] * len(self._moments)
        self._strange = []

    def _fit(self) -> None:
        """Least squares above zero, one cost after the other: they move little from step to step, so this suffices."""
        costs = self._costs
        for _ in range(_SWEEPS):
            for j, row in enumerate(self._gram):
                if row[j] > 0:
                    missing = self._moments[j] - _dot(row, costs)
                    costs[j] = max(0.0, costs[j] + missing / (row[j] + _CALM))

    def check(self) -> None:
        assert all(cost >= 0 for cost in self._costs), "a cost is negative"
        assert self._spread_s >= 0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    total: float = sum(map(mul, left, right))
    return total
