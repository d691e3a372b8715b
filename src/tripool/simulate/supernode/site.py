"""What a simulated worker may ask of its surroundings: the time, the way to the gateway, links, and the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tripool.messages import AnyMessage, Stamped, WorkerId
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.links import Slices
from tripool.simulate.supernode.timeline import Timeline

Run = tuple[Stamped, tuple[int, ...]]
"""A choice's newest token, and those that came right before it and were not told yet."""


class Site(Protocol):
    timeline: Timeline
    layout: Layout
    slices: Slices
    fast_forwards: bool
    """Whether quiet steps are taken many at once, or each by itself: the plain way, for comparison."""

    def tell(self, number: int, worker_id: WorkerId, messages: Sequence[AnyMessage]) -> None:
        """Send to the gateway, in this order. `number`: the worker's own, among all."""

    def tell_runs(self, number: int, worker_id: WorkerId, runs: Sequence[Run]) -> None: ...

    def trusts(self, worker_id: WorkerId) -> bool:
        """Whether this life goes on: its parcels can be read."""

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        """Start to move KV into a worker's memory; when it will be there, in femtoseconds."""
