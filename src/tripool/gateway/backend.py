"""What the gateway needs from whatever computes tokens: a thread of this process, or workers elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from tripool.core import Request, TokenEvent


class Backend(Protocol):
    @property
    def alive(self) -> bool:
        """False once nothing will be served any more."""
        ...

    def stream(self, *requests: Request) -> AsyncGenerator[TokenEvent, None]:
        """Events of all the requests until the last is over; closing it early cancels what is left."""
        ...

    def cancel(self, request_id: str) -> None:
        """End one request of a stream; the stream goes on with its others. Idempotent."""
        ...
