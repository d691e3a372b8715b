"""The interface between the gateway and what generates tokens: an engine thread, or workers in other processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from tripool.core import Request, ServingStats, TokenEvent
from tripool.token_stream import Watcher

Scalar = str | int | float | bool | None
Fact = Scalar | Sequence[Mapping[str, Scalar]]
"""A value, or a table: rows with the same columns."""
Facts = Mapping[str, Fact]
"""Named facts about one request, for a person to read."""


class Backend(Protocol):
    @property
    def alive(self) -> bool:
        """False once no request can be served any more."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest prompt and answer together."""
        ...

    def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of all the requests until the last one ends; closing it early cancels the rest.

        `watcher` is called for each token as it is generated, also for those that are never read.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End one request of a stream; the stream goes on with its others. Idempotent."""
        ...

    def stats(self) -> ServingStats:
        """Must be cheap: every health check and every scrape calls it."""
        ...

    def explain(self, request_id: str) -> Facts:
        """Where the request runs and why. Called while its stream is open; empty if unknown."""
        ...
