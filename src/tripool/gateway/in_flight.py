"""Whether new requests are let in, and how many are inside. Knows nothing else about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tripool.gateway.refusals import Draining


class InFlight:
    """For one event loop: it has no lock."""

    def __init__(self) -> None:
        self.draining = False
        self.num_inside = 0

    def check(self) -> None:
        if self.draining:
            raise Draining("this server takes no more requests", hint="send it to another one, or later")

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
