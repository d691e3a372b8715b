"""What an instance and its workers need of the simulated deployment: time, messages to the gateway, links. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tripool.messages import AnyMessage, WorkerId
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.links import Slices
from tripool.simulate.supernode.timeline import Timeline


class Site(Protocol):
    timeline: Timeline
    layout: Layout
    slices: Slices
    fast_forwards: bool
    """Whether quiet steps are skipped, or taken one by one: the plain way, for comparison."""

    def tell(self, number: int, messages: Sequence[AnyMessage]) -> None:
        """Send to the gateway, in this order. `number`: the worker's own, among all."""

    def trusts(self, worker_id: WorkerId) -> bool:
        """Whether this worker runs: the KV that it sends can be read."""

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        """Start to move KV into a worker's memory; when it will be there, in femtoseconds."""
