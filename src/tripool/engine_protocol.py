"""The protocols of an engine: as `LLM` and `EngineThread` drive it, and as the workers of a split server do.

Not in `engine/`: that room imports the schedulers of `prefill/` and `decode/`, whose workers drive engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from tripool.core import Request, ServingStats, TokenEvent
from tripool.sequence import Seq

if TYPE_CHECKING:
    from tripool.text.files import TextFiles  # only named here; its room loads the tokenizer library


class BatchEngine(Protocol):
    """Requests go in, token events come out, one step at a time. Not thread-safe: one owner drives it.

    A request is over when each of its `n` choices has had an event with a finish reason, or when it was cancelled.
    """

    name: str
    context_tokens: int

    @property
    def busy(self) -> bool:
        """True while a step would have something to do."""

    @property
    def started(self) -> Collection[str]:
        """Requests on which the last step did the very first work."""

    def stats(self) -> ServingStats:
        """From any thread: plain reads, at worst a moment old. The driver of the engine counts steps and stalls."""

    def prepare(self, request: Request) -> Future[Any] | None:
        """From any thread: begin what `add` would take long for, if there is any. `add` once the future is done,
        however it ended, and hold it until then."""

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest or ContextOverflow before any work is done for it."""

    def cancel(self, request_id: str) -> None:
        """Forget every choice of a request and free what it held, at once. Unknown and finished ids are fine."""

    def step(self) -> list[TokenEvent]:
        """Raises only what leaves the engine of no use."""

    def take_failed(self) -> Sequence[str]:
        """Requests that a fault of the engine has ended since the last call; nothing of them is held."""


class StepEngine(BatchEngine, Protocol):
    """An engine that answers whole requests in one process."""

    text: TextFiles
    step_tokens: int
    """Tokens computed in one step at most."""
    weight_bytes: int
    kv_bytes: int
    from_weight_cache: bool
    """Its weights were mapped from the weight cache, and no checkpoint was read."""


class PoolEngine(BatchEngine, Protocol):
    """An engine whose sequences can leave for another process, or arrive from one."""

    vocab: int
    max_running: int
    """Sequences that may be in its batch at once."""
    num_blocks: int
    block_tokens: int
    block_bytes: int

    @property
    def num_held_blocks(self) -> int:
        """Blocks that some sequence holds; what only remembers a prefix is free."""

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens that are still to be computed."""

    def check(self, request: Request) -> None:
        """Raises what makes a request impossible here, before any work."""

    def prompt_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        """Keys of the full blocks among a prompt's first tokens."""

    def add(self, request: Request, answered: Mapping[int, Sequence[int]] | None = None) -> None:
        """`answered`: the open choices and what is known of each; it is computed again, never chosen again."""

    def detach(self, request_id: str, choice: int) -> Seq:
        """Out of the batch, right after its token; its blocks are held until `release`."""

    def release(self, seq: Seq) -> None: ...

    def attach(
        self,
        request: Request,
        choice: int,
        answer: Sequence[int],
        num_computed: int,
        *,
        num_cached: int = 0,
        shared: Sequence[int] = (),
    ) -> Seq | None:
        """Blocks for a sequence from elsewhere, to be filled; None while there is no room."""

    def start(self, seq: Seq) -> None:
        """Its blocks are filled."""

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest prefix that is known here, until `let_go`."""

    def keep_more(self, blocks: list[int], count: int) -> None:
        """Append blocks to be filled, as many of `count` as are free."""

    def let_go(self, blocks: list[int], keys: Sequence[bytes] = ()) -> None:
        """Those that have a key are full, and can be found by it from now on."""

    def export_block(self, block: int, into: memoryview) -> None: ...

    def import_block(self, block: int, data: memoryview) -> None: ...


def local_id(request_id: str, attempt: int) -> str:
    """What a worker's engine calls one placement: two attempts of a request may meet there, and must not mix."""
    return f"{request_id}#{attempt}"


_ID: Any = Request.__dict__["id"]
_SLOTS: list[Any] = [Request.__dict__[field.name] for field in fields(Request) if field.name != "id"]


def renamed(request: Request, name: str) -> Request:
    """As `dataclasses.replace(request, id=name)`, in a tenth of the time: slot by slot."""
    copied = object.__new__(Request)
    for slot in _SLOTS:
        slot.__set__(copied, slot.__get__(request))
    _ID.__set__(copied, name)
    return copied
