"""The seam between whoever drives an engine (LLM, EngineThread, a simulator) and what computes tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from tripool.core import Request, ServingStats, TokenEvent

if TYPE_CHECKING:
    from tripool.text.files import TextFiles  # only named here; its room loads the tokenizer library


class StepEngine(Protocol):
    """Requests go in, token events come out, one step at a time. Not thread-safe: one owner drives it.

    A request is over when each of its `n` choices has had an event with a finish reason, or when it was cancelled.
    """

    @property
    def name(self) -> str: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def text(self) -> TextFiles: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def busy(self) -> bool:
        """True while a step would have something to do."""
        ...

    def prepare(self, request: Request) -> Future[Any] | None:
        """From any thread: begin what `add` would take long for, if there is any. `add` once the future is done,
        however it ended, and hold it until then."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest or ContextOverflow before any work is done for it."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request and free what it held, at once. Unknown and finished ids are fine."""
        ...

    def step(self) -> list[TokenEvent]:
        """Raises only what leaves the engine of no use."""
        ...

    def take_failed(self) -> Sequence[str]:
        """Requests that a fault of the engine's has ended since this was last asked; nothing of them is held."""
        ...

    @property
    def started(self) -> Collection[str]:
        """Requests on which the last step did the very first work."""
        ...

    def stats(self) -> ServingStats:
        """From any thread: plain reads, at worst a moment old. Steps and stalls are the driver's to know."""
        ...
