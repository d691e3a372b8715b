"""A deployment of many chips in virtual time, on modelled engines, over the code that serves. Pure.

`simulate_trace` sends requests through a layout (`lay_out` makes one of a deployment file) under faults, and
reports what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tripool.bench.trace import TraceRequest
from tripool.simulate.supernode.faults import Fault, parse_fault
from tripool.simulate.supernode.layout import Layout, lay_out
from tripool.simulate.supernode.measures import Tree
from tripool.simulate.supernode.report import report_data
from tripool.simulate.supernode.run import TraceRun

__all__ = ["Fault", "Layout", "lay_out", "parse_fault", "simulate_trace"]


def simulate_trace(
    layout: Layout,
    requests: Iterable[TraceRequest],
    *,
    trace: str,
    notes: Sequence[str] = (),
    faults: Sequence[Fault] = (),
    slice_s: float = 30.0,
    most_blocks: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tree:
    """`trace`: the name of the requests; `notes`: what was drawn or inferred for them."""
    run = TraceRun(layout, requests, faults, slice_s=slice_s, most_blocks=most_blocks)
    run.run(progress)
    return report_data(run, trace, notes)
