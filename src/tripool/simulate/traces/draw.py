"""Numbers of common distributions from an rng: exponential, normal, gamma, Weibull. Pure."""

from __future__ import annotations

from math import cos, exp, log, pi, sqrt

from tripool.simulate.rng import Rng


def exponential_of(rng: Rng) -> float:
    return -log(1.0 - rng.bits() / 2.0**64)


def normal_of(rng: Rng) -> float:
    return sqrt(2.0 * exponential_of(rng)) * cos(rng.uniform(0.0, 2.0 * pi))


def lognormal_of(rng: Rng, mean: float, sigma: float) -> float:
    return mean * exp(sigma * normal_of(rng) - sigma * sigma / 2.0)


def weibull_of(rng: Rng, shape: float) -> float:
    """Of scale 1."""
    return float(exponential_of(rng) ** (1.0 / shape))


def gamma_of(rng: Rng, shape: float) -> float:
    """Of scale 1; by Marsaglia and Tsang's squeeze."""
    if shape < 1.0:
        return float(gamma_of(rng, shape + 1.0) * exp(-exponential_of(rng) / shape))
    d = shape - 1.0 / 3.0
    c = 1.0 / sqrt(9.0 * d)
    while True:
        x = normal_of(rng)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and exponential_of(rng) > d * (v - 1.0 - log(v)) - x * x / 2.0:
            return d * v
