"""The simulation room: a whole deployment in virtual time, drawn from a seed. Pure; imports no engine that computes."""

from __future__ import annotations

from collections.abc import Callable

from tripool.simulate.faults import Faults
from tripool.simulate.scenario import draw
from tripool.simulate.world import Report, World

__all__ = ["Report", "simulate"]


def simulate(seed: int, *, faults: bool = True, trace: Callable[[str], None] | None = None) -> Report:
    """One life. Raises AssertionError when anything that must hold does not."""
    world = World(draw(seed, faults=faults), trace)
    Faults(world)
    return world.run()
