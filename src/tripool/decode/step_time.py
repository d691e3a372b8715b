"""Step time model: predicts the duration of a step by a linear fit over the steps that ran. Pure.

A step has a fixed cost (the weights are read once), a cost per row, per token of context that rows read, per prompt
token. None of these can be negative. They are fitted by least squares over the last two hundred steps, so that a
machine that gets slower is noticed. Outliers count for little, so that a single slow step is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tripool.sequence import Task

_SCALES = (1.0, 16.0, 16.0, 8192.0, 256.0, 65536.0)
"""About what a busy step has of each, so that no cost is learned much faster than another."""
_ONE_ROW = 1.0 / _SCALES[1]
_KEEP = 0.995
"""Decay per step: about two hundred count."""
_SWEEPS = 2
_CALM = 1e-3
"""Regularisation: without it a cost with few samples would follow the noise."""
_FIRST_STEPS = 8
"""The first steps are never outliers."""
_OUTLIER = 4.0
"""In usual errors: a step further off counts less, the further the less."""
_SPREAD_RATE = 0.05
_MUCH = 0.2
_STRANGE_STEPS = 8
"""So many outliers in a row mean that the machine has changed: the costs are scaled in proportion."""


@dataclass(slots=True)
class StepFacts:
    """What one step computes. Never changed, but not frozen: that would take longer than to count."""

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
        _, rows, drafts, context, prompt, reads = _SCALES
        return (
            1.0, self.rows / rows, self.drafts / drafts, self.context_tokens / context,
            self.prompt_tokens / prompt, self.prompt_reads / reads,
        )  # fmt: skip


class StepTime:
    def __init__(self) -> None:
        size = len(_SCALES)
        self._costs = [0.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._has_other = False
        """Whether a step had a draft or a prompt."""
        self.error_s = 0.0
        """Mean error of the last predictions; outliers are cut."""
        self._strange: list[float] = []
        """Actual over expected time of the last steps, while all of them are outliers."""
        self.num_learned = 0
        self.most_rows = 0
        self.most_prompt_tokens = 0
        """The largest seen: far beyond them the fit is a guess."""
        self.fixed_s = self.row_s = self.draft_s = self.context_token_s = 0.0
        self.prompt_token_s = self.prompt_read_s = 0.0
        """Seconds per unit of each cost."""

    def predict_s(self, facts: StepFacts) -> float:
        return _dot(self._costs, facts.features())

    def alone_s(self, context_tokens: int) -> float:
        """`predict_s(StepFacts(1, 0, context_tokens))`, faster: called for every row of every step."""
        costs = self._costs
        return costs[0] + costs[1] * _ONE_ROW + costs[3] * (context_tokens / _SCALES[3])

    def learn(self, facts: StepFacts, step_s: float) -> float:
        """Returns the duration that was predicted before."""
        features = facts.features()
        expected_s = _dot(self._costs, features)
        weight = self._weight(abs(step_s - expected_s))
        strange = weight < 1 and abs(step_s - expected_s) > _MUCH * expected_s > 0
        self._strange = [*self._strange, step_s / expected_s] if strange else []
        if len(self._strange) == _STRANGE_STEPS:
            self._start_over(sorted(self._strange)[_STRANGE_STEPS // 2])
        _, f1, f2, f3, f4, f5 = features
        self._has_other |= bool(f2 or f4 or f5)
        if self._has_other:
            self._add(features, weight, step_s)
            self._fit()
        else:
            self._learn_rows(f1, f3, weight, step_s)
        self._set_costs()
        self.num_learned += 1
        if facts.rows > self.most_rows:
            self.most_rows = facts.rows
        if facts.prompt_tokens > self.most_prompt_tokens:
            self.most_prompt_tokens = facts.prompt_tokens
        return expected_s

    def _add(self, features: tuple[float, ...], weight: float, step_s: float) -> None:
        moments = self._moments
        f0, f1, f2, f3, f4, f5 = features
        for i, (row, own) in enumerate(zip(self._gram, features, strict=True)):
            if own or row[i]:  # else this cost was never seen, and its row is empty
                share = weight * own
                r0, r1, r2, r3, r4, r5 = row
                row[:] = (
                    r0 * _KEEP + share * f0, r1 * _KEEP + share * f1, r2 * _KEEP + share * f2,
                    r3 * _KEEP + share * f3, r4 * _KEEP + share * f4, r5 * _KEEP + share * f5,
                )  # fmt: skip
                moments[i] = moments[i] * _KEEP + share * step_s

    def _learn_rows(self, rows: float, context: float, weight: float, step_s: float) -> None:
        """`_add` and `_fit` where no step had a draft or a prompt, as on a decode worker: the same sums without what
        is zero."""
        gram, moments, costs = self._gram, self._moments, self._costs
        g0, g1, g3 = gram[0], gram[1], gram[3]
        row_share, context_share = weight * rows, weight * context
        g00, g01, g03 = g0[0] * _KEEP + weight, g0[1] * _KEEP + row_share, g0[3] * _KEEP + context_share
        g10, g11, g13 = g1[0] * _KEEP + row_share, g1[1] * _KEEP + row_share * rows, g1[3] * _KEEP + row_share * context
        g30, g31 = g3[0] * _KEEP + context_share, g3[1] * _KEEP + context_share * rows
        g33 = g3[3] * _KEEP + context_share * context
        g0[0], g0[1], g0[3], g1[0], g1[1], g1[3], g3[0], g3[1], g3[3] = g00, g01, g03, g10, g11, g13, g30, g31, g33
        m0 = moments[0] = moments[0] * _KEEP + weight * step_s
        m1 = moments[1] = moments[1] * _KEEP + row_share * step_s
        m3 = moments[3] = moments[3] * _KEEP + context_share * step_s
        c0, c1, c3 = costs[0], costs[1], costs[3]
        for _ in range(_SWEEPS):
            c0 += (m0 - (g00 * c0 + g01 * c1 + g03 * c3)) / (g00 + _CALM)
            c0 = c0 if c0 > 0.0 else 0.0
            if g11 > 0:
                c1 += (m1 - (g10 * c0 + g11 * c1 + g13 * c3)) / (g11 + _CALM)
                c1 = c1 if c1 > 0.0 else 0.0
            if g33 > 0:
                c3 += (m3 - (g30 * c0 + g31 * c1 + g33 * c3)) / (g33 + _CALM)
                c3 = c3 if c3 > 0.0 else 0.0
        costs[0], costs[1], costs[3] = c0, c1, c3

    def _weight(self, error_s: float) -> float:
        """How much a step with this error counts. A lasting change raises the usual error, and so counts again soon."""
        if self.num_learned < _FIRST_STEPS:
            self.error_s = error_s if self.num_learned else 0.0
            return 1.0
        bound_s = _OUTLIER * self.error_s
        cut_s = min(error_s, 2 * bound_s) if bound_s > 0 else error_s
        self.error_s += _SPREAD_RATE * (cut_s - self.error_s)
        return bound_s / error_s if error_s > bound_s > 0 else 1.0

    def _start_over(self, slower: float) -> None:
        """Scale the costs, and forget the steps that they were fitted to."""
        self._costs = [cost * slower for cost in self._costs]
        self.error_s *= max(1.0, slower)
        self._gram = [[0.0] * len(row) for row in self._gram]
        self._moments = [0.0] * len(self._moments)
        self._strange = []
        self._set_costs()

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent: the costs move little from step to step."""
        costs, moments = self._costs, self._moments
        known = [(j, row) for j, row in enumerate(self._gram) if row[j] > 0]
        for _ in range(_SWEEPS):
            for j, row in known:
                r0, r1, r2, r3, r4, r5 = row
                c0, c1, c2, c3, c4, c5 = costs
                expected = r0 * c0 + r1 * c1 + r2 * c2 + r3 * c3 + r4 * c4 + r5 * c5
                cost = costs[j] + (moments[j] - expected) / (row[j] + _CALM)
                costs[j] = cost if cost > 0.0 else 0.0

    def _set_costs(self) -> None:
        """As attributes: learned seldom, read often."""
        _, rows, drafts, context, prompt, reads = _SCALES
        self.fixed_s, row, draft, token, prompt_token, read = self._costs
        self.row_s, self.draft_s, self.context_token_s = row / rows, draft / drafts, token / context
        self.prompt_token_s, self.prompt_read_s = prompt_token / prompt, read / reads

    def check(self) -> None:
        assert all(cost >= 0 for cost in self._costs), "a cost is negative"
        assert self.error_s >= 0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    a0, a1, a2, a3, a4, a5 = left
    b0, b1, b2, b3, b4, b5 = right
    return a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3 + a4 * b4 + a5 * b5
