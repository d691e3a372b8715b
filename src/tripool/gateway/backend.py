"""What the gateway needs from whatever computes tokens: a thread of this process, or workers elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from tripool.core import Request, ServingStats, TokenEvent
from tripool.mailbox import Watcher

Scalar = str | int | float | bool | None
Fact = Scalar | Sequence[Mapping[str, Scalar]]
"""A value, or a table: rows with the same columns."""
Facts = Mapping[str, Fact]
"""Named facts about one request, for a person to read."""


class Backend(Protocol):
    @property
    def alive(self) -> bool:
        """False once nothing will be served any more."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest prompt and answer together."""
        ...

    def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of all the requests until the last is over; closing it early cancels what is left.

        `watcher` is told of each when it comes, also of those that are never read.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End one request of a stream; the stream goes on with its others. Idempotent."""
        ...

    def stats(self) -> ServingStats:
        """Cheap: asked for by every health check and every scrape."""
        ...

    def explain(self, request_id: str) -> Facts:
        """Where the request runs and why, as `explain` shows it. Asked while its stream is open; empty if unknown."""
        ...
