"""A deployment of many chips in virtual time, on modelled engines, over the code that serves. Pure.

`simulate_trace` sends requests through a layout (`lay_out` makes one of a deployment file) under faults, and
reports what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tripool.bench.trace import TraceRequest
from tripool.simulate.supernode.faults import Fault, Faults, parse_fault
from tripool.simulate.supernode.layout import Layout, lay_out
from tripool.simulate.supernode.measures import Tree
from tripool.simulate.supernode.report import report_data
from tripool.simulate.supernode.world import World

__all__ = ["Fault", "Layout", "lay_out", "parse_fault", "simulate_trace"]


def simulate_trace(
    layout: Layout,
    requests: Iterable[TraceRequest],
    *,
    trace: str,
    notes: Sequence[str] = (),
    faults: Sequence[Fault] = (),
    fast_forwards: bool = True,
    slice_s: float = 30.0,
    most_blocks: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tree:
    """`trace`: the name of the requests; `notes`: what was drawn or inferred for them.

    `fast_forwards`: False runs every decode step, with the same result.
    """
    world = World(layout, requests, fast_forwards=fast_forwards, slice_s=slice_s, most_blocks=most_blocks)
    struck = Faults(world, list(faults)).struck
    world.run(progress)
    return report_data(world, struck, trace, notes)
