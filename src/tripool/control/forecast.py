"""Forecast of one pool's demand, from the last minutes and from the shape of earlier days. Pure.

| forecast | how |
|---|---|
| trend | level and slope of the last minutes |
| shape | the level, times what earlier days did from this time of the day to that one |

A slope fades, because what rises now does not rise for ever, and counts only as far as it stands out of the noise.
Trend and shape are mixed by how far off each was lately. Beside the forecast there is the noise: how far single reports
lie from the level.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp, log, sqrt

DAY_S = 86400.0
_BIN_S = 600.0
"""Of the day's shape."""
_LEVEL_S, _TREND_S, _NOISE_S = 30.0, 60.0, 900.0
"""Over which level, slope and noise are smoothed."""
_FADE_S = 90.0
"""After which a slope has done most of what it does."""
_CLEAR = 1.5
"""In how many usual slopes a slope stands out."""
_MOST_GROWTH = 2.0
"""Of a trend, over any time: a slope over a minute says no more."""
_LITTLE = 0.25
"""Workers that are added to both sides of a ratio: near zero every ratio is large."""
_ERROR_RATE = 0.005
"""Weight of one more error in the mean of each forecast."""


@dataclass(slots=True)
class _Made:
    due_s: float
    trend: float
    shape: float


class Forecast:
    def __init__(self) -> None:
        self.level = 0.0
        self._slope = self._slope_square = 0.0
        self._square = 0.0
        """Of how far reports lie from the level."""
        self._last_s: float | None = None
        self._made: deque[_Made] = deque()
        self._errors = {"trend": 0.1, "shape": 0.2}
        """Mean size, as logarithms of ratios; before anything is known the shape is the worse one."""
        self._earlier: dict[int, tuple[float, int]] = {}
        """Mean demand by ten minutes of the day, and of how many days."""
        self._today: dict[int, tuple[float, int]] = {}
        self._day = -1

    def observe(self, value: float, now_s: float, ahead_s: float) -> None:
        """`ahead_s`: how far ahead errors are learned."""
        assert value >= 0.0
        if self._last_s is None:
            self.level = value
        else:
            passed_s = now_s - self._last_s
            assert passed_s > 0.0, "time stands still"
            self._smooth(value, passed_s)
        self._last_s = now_s
        self._learn_shape(value, now_s)
        while self._made and self._made[0].due_s <= now_s:
            self._judge(self._made.popleft())
        shape = self._by_shape(ahead_s, now_s)
        if shape is not None:
            self._made.append(_Made(now_s + ahead_s, self._by_trend(ahead_s), shape))

    def at(self, ahead_s: float) -> float:
        """Expected demand."""
        assert self._last_s is not None, "nothing is known"
        trend, shape = self._by_trend(ahead_s), self._by_shape(ahead_s, self._last_s)
        if shape is None:
            return trend
        share = self.shape_share
        return share * shape + (1.0 - share) * trend

    @property
    def noise(self) -> float:
        """Usual distance of a report from the level."""
        return sqrt(self._square)

    @property
    def shape_share(self) -> float:
        """How much of the mixture is the day's shape, where that is known."""
        trend, shape = self._errors["trend"] ** 2, self._errors["shape"] ** 2
        return trend / (trend + shape) if trend + shape else 0.5

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _smooth(self, value: float, passed_s: float) -> None:
        expected = self.level + self._slope * passed_s
        off = value - expected
        level = max(0.0, expected + _weight(passed_s, _LEVEL_S) * off)
        slope = (level - self.level) / passed_s
        self._slope += _weight(passed_s, _TREND_S) * (slope - self._slope)
        self._slope_square += _weight(passed_s, _NOISE_S) * (self._slope**2 - self._slope_square)
        # A jump is no noise: it counts as a few usual distances at most.
        most = 9.0 * self._square + 1e-4
        self._square += _weight(passed_s, _NOISE_S) * (min(off * off, most) - self._square)
        self.level = level

    def _by_trend(self, ahead_s: float) -> float:
        usual = _CLEAR * sqrt(self._slope_square)
        clear = max(0.0, abs(self._slope) - usual) * (1.0 if self._slope > 0 else -1.0)
        change = clear * _FADE_S * (1.0 - exp(-ahead_s / _FADE_S))
        return min(max(self.level + change, self.level / _MOST_GROWTH), self.level * _MOST_GROWTH)

    def _by_shape(self, ahead_s: float, now_s: float) -> float | None:
        here, there = (self._earlier.get(_bin_of(at_s)) for at_s in (now_s, now_s + ahead_s))
        if here is None or there is None:
            return None
        return self.level * (there[0] + _LITTLE) / (here[0] + _LITTLE)

    # ---- learning ---------------------------------------------------------------------------------------------------

    def _learn_shape(self, value: float, now_s: float) -> None:
        day = int(now_s // DAY_S)
        if day != self._day:
            for number, (mean, _) in self._today.items():
                before, days = self._earlier.get(number, (0.0, 0))
                self._earlier[number] = (before * days + mean) / (days + 1), min(days + 1, 7)
            self._today, self._day = {}, day
        number = _bin_of(now_s)
        mean, count = self._today.get(number, (0.0, 0))
        self._today[number] = mean + (value - mean) / (count + 1), count + 1

    def _judge(self, made: _Made) -> None:
        """The time of a forecast has come."""
        for name, value in (("trend", made.trend), ("shape", made.shape)):
            off = abs(log((self.level + _LITTLE) / (value + _LITTLE)))
            self._errors[name] += _ERROR_RATE * (off - self._errors[name])

    def check(self) -> None:
        assert self.level >= 0.0 and self._square >= 0.0 and self._slope_square >= 0.0
        assert all(error >= 0.0 for error in self._errors.values())
        dues = [made.due_s for made in self._made]
        assert dues == sorted(dues), "forecasts out of order"


def _weight(passed_s: float, over_s: float) -> float:
    return 1.0 - exp(-passed_s / over_s)


def _bin_of(at_s: float) -> int:
    return int(at_s % DAY_S // _BIN_S)
