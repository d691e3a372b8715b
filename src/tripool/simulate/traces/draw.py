"""Numbers of common distributions from dice: exponential, normal, gamma, Weibull. Pure."""

from __future__ import annotations

from math import cos, exp, log, pi, sqrt

from tripool.simulate.dice import Dice


def exponential_of(dice: Dice) -> float:
    return -log(1.0 - dice.bits() / 2.0**64)


def normal_of(dice: Dice) -> float:
    return sqrt(2.0 * exponential_of(dice)) * cos(dice.uniform(0.0, 2.0 * pi))


def lognormal_of(dice: Dice, mean: float, sigma: float) -> float:
    return mean * exp(sigma * normal_of(dice) - sigma * sigma / 2.0)


def weibull_of(dice: Dice, shape: float) -> float:
    """Of scale 1."""
    return float(exponential_of(dice) ** (1.0 / shape))


def gamma_of(dice: Dice, shape: float) -> float:
    """Of scale 1; by Marsaglia and Tsang's squeeze."""
    if shape < 1.0:
        return float(gamma_of(dice, shape + 1.0) * exp(-exponential_of(dice) / shape))
    d = shape - 1.0 / 3.0
    c = 1.0 / sqrt(9.0 * d)
    while True:
        x = normal_of(dice)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and exponential_of(dice) > d * (v - 1.0 - log(v)) - x * x / 2.0:
            return d * v
