"""Simulation: a whole deployment in virtual time, drawn from a seed. It needs no engine that computes."""

from __future__ import annotations

from collections.abc import Callable

from tripool.simulate.run import FaultRun, Report
from tripool.simulate.scenario import draw

__all__ = ["Report", "simulate"]


def simulate(seed: int, *, faults: bool = True, trace: Callable[[str], None] | None = None) -> Report:
    """One run. Raises AssertionError when a rule is broken."""
    return FaultRun(draw(seed, faults=faults), trace).run()
