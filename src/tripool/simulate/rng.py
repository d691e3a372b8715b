"""Random numbers from a seed: the same on every machine and every Python. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, exp, log, pi, sqrt
from typing import TypeVar

_MASK = 2**64 - 1

Item = TypeVar("Item")


def mix(value: int) -> int:
    """64 bits in, 64 well-stirred bits out (the finaliser of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Rng:
    def __init__(self, seed: int) -> None:
        self._state = mix(seed & _MASK)

    def bits(self) -> int:
        self._state = value = (self._state + 0x9E3779B97F4A7C15) & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK  # `mix`, without a call
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        return value ^ (value >> 31)

    def chance(self, probability: float) -> bool:
        return self.bits() < probability * 2.0**64

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.bits() % (high - low + 1)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * (self.bits() / 2.0**64)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.bits() % len(items)]

    def exponential(self) -> float:
        return -log(1.0 - self.bits() / 2.0**64)

    def normal(self) -> float:
        return sqrt(2.0 * self.exponential()) * cos(self.uniform(0.0, 2.0 * pi))

    def lognormal(self, mean: float, sigma: float) -> float:
        return mean * exp(sigma * self.normal() - sigma * sigma / 2.0)

    def weibull(self, shape: float) -> float:
        """Of scale 1."""
        return float(self.exponential() ** (1.0 / shape))

    def gamma(self, shape: float) -> float:
        """Of scale 1; by Marsaglia and Tsang's squeeze."""
        if shape < 1.0:
            return float(self.gamma(shape + 1.0) * exp(-self.exponential() / shape))
        d = shape - 1.0 / 3.0
        c = 1.0 / sqrt(9.0 * d)
        while True:
            x = self.normal()
            v = (1.0 + c * x) ** 3
            if v > 0.0 and self.exponential() > d * (v - 1.0 - log(v)) - x * x / 2.0:
                return d * v
