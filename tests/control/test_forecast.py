"""Forecasts: level, slopes that stand out, and the shape of earlier days where it was right."""

from __future__ import annotations

from math import pi, sin
from random import Random

import pytest

from tripool.control.forecast import DAY_S, Forecast


def fed(values, every_s: float = 15.0, begin_s: float = 0.0) -> Forecast:
    forecast = Forecast()
    for number, value in enumerate(values):
        forecast.observe(value, begin_s + every_s * number, 180.0)
        forecast.check()
    return forecast


def test_a_steady_demand_stays():
    forecast = fed([3.0] * 100)
    assert forecast.at(0.0) == forecast.at(180.0) == pytest.approx(3.0)
    assert forecast.noise < 0.01


def test_noise_is_no_trend():
    rng = Random(1)
    forecast = fed([3.0 + rng.gauss(0.0, 0.2) for _ in range(400)])
    assert forecast.at(180.0) == pytest.approx(3.0, abs=0.35)
    assert 0.1 < forecast.noise < 0.4


def test_a_rise_goes_on_for_a_while_and_not_for_ever():
    forecast = fed([2.0] * 100 + [2.0 + 0.1 * number for number in range(12)])
    assert forecast.level > 2.8
    assert forecast.level < forecast.at(60.0) < forecast.at(180.0) < forecast.level + 1.2


def test_nothing_is_below_zero():
    forecast = fed([5.0 - 0.2 * number for number in range(25)] + [0.0] * 20)
    assert 0.0 <= forecast.at(600.0) < 0.1


def day(at_s: float) -> float:
    return 5.0 + 4.0 * sin(2 * pi * at_s / 7200.0)


def test_the_shape_of_earlier_days_is_used_where_it_was_right():
    forecast, at_s = Forecast(), 0.0
    while at_s < 3 * DAY_S:
        forecast.observe(day(at_s), at_s, 900.0)
        at_s += 60.0
    assert forecast.shape_share > 0.5
    rising_s = 3 * DAY_S + 60.0
    forecast.observe(day(rising_s), rising_s, 900.0)
    assert forecast.at(900.0) > day(rising_s) + 1.0


def test_the_shape_of_earlier_days_is_not_used_where_it_was_wrong():
    """Every day rises and falls at other times."""
    rng, forecast, at_s, phase_s = Random(2), Forecast(), 0.0, 0.0
    while at_s < 4 * DAY_S:
        if at_s % DAY_S == 0.0:
            phase_s = rng.uniform(0.0, 7200.0)
        forecast.observe(day(at_s + phase_s), at_s, 180.0)
        at_s += 60.0
    assert forecast.shape_share < 0.4
