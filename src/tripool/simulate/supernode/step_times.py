"""How long a modelled engine takes: the planner's cost model, asked rarely and remembered. Pure.

A decode step's time is a straight line in the batch's context, between knots. A line has whole femtoseconds, so that
the time of many steps is a sum in whole numbers, in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import floor, inf, isqrt, log10

from tripool.planner.cost import DecodeModel, PrefillModel
from tripool.simulate.timeline import to_fs

_KNOTS = (0, *(2**power for power in range(10, 26, 2)))
"""Tokens of one request's context between which a step's time is a straight line."""


@dataclass(frozen=True, slots=True)
class Line:
    """Femtoseconds of a step: `fixed + per_token x context` while the batch's context is below `limit`."""

    fixed_fs: int
    token_fs: int
    limit: int

    def step_fs(self, context: int) -> int:
        return self.fixed_fs + self.token_fs * context


Trouble = tuple[float, float]
"""How many times as long a whole step takes (a slow rank), and its experts (a hot one)."""
NO_TROUBLE: Trouble = (1.0, 1.0)


class DecodeTimes:
    """Of one instance. `step`: seconds, and seconds of the experts, for requests and mean context of the whole batch.

    A step gives each request `tokens_per_step` tokens; here it gives one, in that much less time.
    """

    def __init__(self, step: Callable[[float, float], tuple[float, float]], tokens_per_step: float = 1.0) -> None:
        self._step, self._tokens_per_step = step, tokens_per_step
        self._lines: dict[tuple[int, Trouble], tuple[list[Line], list[int]]] = {}
        """With their limits."""

    @classmethod
    def of(cls, model: DecodeModel) -> DecodeTimes:
        ranks = model.setup.ep

        def step(requests: float, context: float) -> tuple[float, float]:
            found = model.step(requests / ranks, context)
            return found.seconds, dict(found.parts).get("experts", 0.0)

        return cls(step, model.setup.tokens_per_step)

    def line(self, requests: int, context: int, trouble: Trouble = NO_TROUBLE) -> Line:
        """Of a step of so many requests whose contexts sum to `context`."""
        about = _rounded(requests)
        known = self._lines.get((about, trouble))
        if known is None:
            drawn = self._draw(about, trouble)
            known = self._lines[about, trouble] = drawn, [line.limit for line in drawn]
        lines, limits = known
        return lines[bisect_right(limits, context)]

    def _draw(self, requests: int, trouble: Trouble) -> list[Line]:
        slow, hot = trouble

        def at(knot: int) -> int:
            seconds, experts_s = self._step(requests, float(knot))
            return to_fs((seconds + (hot - 1.0) * experts_s) * slow / self._tokens_per_step)

        lines, low_fs = [], at(0)
        for low, high in pairwise(_KNOTS):
            high_fs = at(high)
            token_fs = (high_fs - low_fs) // ((high - low) * requests)
            lines.append(Line(low_fs - token_fs * low * requests, token_fs, high * requests))
            low_fs = high_fs
        last = lines[-1]
        lines[-1] = Line(last.fixed_fs, last.token_fs, 2**80)
        return lines


class PrefillTimes:
    """`step`: seconds for new tokens, and how much context each of them reads on average."""

    def __init__(self, step: Callable[[float, float], float]) -> None:
        self._step = step
        self._known: dict[tuple[int, int], float] = {}

    @classmethod
    def of(cls, model: PrefillModel) -> PrefillTimes:
        """Ranks of an instance share the tokens of a batch."""
        ranks = model.setup.ep

        def step(tokens: float, mean_context: float) -> float:
            # A prompt of twice the mean context, computed from its first token, reads so much on average.
            return model.step_s(tokens / ranks, max(1.0, 2.0 * mean_context))

        return cls(step)

    def step_s(self, tokens: int, reads: int) -> float:
        """`reads`: context that all of them read together."""
        key = (_gridded(tokens), _gridded(reads // max(1, tokens)))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._step(*key)
        return found

    def added_s(self, tokens: int, reads: int) -> float:
        """What they add to a step that runs in any case: not what a step costs whatever it computes."""
        return max(0.0, self.step_s(tokens, reads) - self.step_s(1, 1))


@lru_cache(maxsize=2**14)
def _gridded(count: int) -> int:
    """Within about one in sixty of the count, or eight tokens."""
    grid: int = max(16, 1 << max(0, count.bit_length() - 6))
    return max(1, (count + grid // 2) // grid * grid) if count >= grid else max(1, count)


def _rounded(count: int) -> int:
    """Three digits: the model is not better than that, and asked seldom."""
    if count < 1000:
        return count
    power: int = 10 ** (floor(log10(count)) - 2)
    return round(count / power) * power


def steps_within(line: Line, context: int, grows: int, most: float = inf) -> int:
    """How many steps in a row begin below the line's limit, when each makes the context so much longer."""
    steps = (line.limit - 1 - context) // grows + 1 if grows else 2**40
    return steps if steps < most else int(most)


def span_fs(line: Line, context: int, grows: int, count: int) -> int:
    """Of `count` steps, the first of which begins at `context`."""
    return count * line.fixed_fs + line.token_fs * (count * context + grows * (count * (count - 1) // 2))


def steps_in(line: Line, context: int, grows: int, most: int, span: int) -> int:
    """How many whole steps, at most `most`, fit into so many femtoseconds."""
    # `span_fs` of n steps is (a n n + b n) / 2: solved in whole numbers, without rounding.
    a = line.token_fs * grows
    b = 2 * (line.fixed_fs + line.token_fs * context) - a
    steps = (isqrt(b * b + 8 * a * span) - b) // (2 * a) if a else 2 * span // b
    return steps if steps < most else most
