"""The streams of one engine: passes its token events to asyncio tasks, wherever it is driven. Knows no HTTP, no text.

| thread | does |
|---|---|
| any event loop | gives commands (add, cancel), awaits its own queue |
| the one that receives reports | posts events: one wake-up per loop and step, not per token |

A fault of one request ends its stream with RequestFailed, and no other. The end of the engine ends every open stream
with EngineStopped, so that no client waits for tokens that cannot come.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from tripool.core import Request, ServingStats, TokenEvent
from tripool.engine.wire import AddRequests, CancelRequest, Command, Facts, StepReport
from tripool.errors import EngineStopped, TripoolError
from tripool.token_stream import TokenStream, Watcher

_Item = TokenEvent | TripoolError | str
"""A token, an error, or the id of a cancelled request."""

_MAX_EXPLAINED = 1000
SHUT_DOWN = "the engine is shut down"


class _Stream(TokenStream):
    """One consumer, and its event loop."""

    def __init__(self, requests: tuple[Request, ...], watcher: Watcher | None, now_s: float) -> None:
        super().__init__(requests, watcher, now_s)
        self.loop = asyncio.get_running_loop()


class EngineBackend(ABC):
    """`stream()` and `cancel()` from any event loop, `close()` and the rest from anywhere."""

    def __init__(self, name: str, context_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.context_tokens = name, context_tokens
        self._clock = clock
        self._moved_s = clock()
        """When the last report came, or work after there was none."""
        self._lock = threading.Lock()
        """Guards the fields below: close() must be able to end streams while a step hangs."""
        self._streams: dict[str, _Stream] = {}
        self._num_steps = self._num_preparing = 0
        """Of the last report."""
        self._ended: str | None = None
        """Why nothing is served any more."""
        self._explained: OrderedDict[str, Facts] = OrderedDict()
        """Facts of the last requests, for `explain`."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """To the driver. Never waits; called under the lock, so that a cancel comes after what it cancels."""

    @abstractmethod
    def _engine_stats(self) -> ServingStats:
        """As far as they are known here."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Stop after the step in progress and end open streams; False when the engine did not stop in time.

        Also then every stream is ended.
        """

    def end(self) -> None:
        """End open streams without waiting for the step in progress."""
        self.close(0)

    @property
    def alive(self) -> bool:
        return self._ended is None

    def stats(self) -> ServingStats:
        waited_for = len(self._streams) > self._num_preparing
        stalled_s = max(0.0, self._clock() - self._moved_s) if waited_for else 0.0
        return replace(self._engine_stats(), num_steps=self._num_steps, stalled_s=stalled_s)

    def explain(self, request_id: str) -> Mapping[str, str | int | float]:
        """The load that it found, and the limit that held it back."""
        with self._lock:
            return {"mode": "colocated", "engine": self.name, **self._explained.get(request_id, {})}

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of one or several requests until all are over. Leaving early, in any way, cancels the rest.

        Raises what the engine's `add` raises, in which case none of the requests runs.
        """
        stream = _Stream(requests, watcher, self._clock())
        left = stream.choices_left
        try:
            with self._lock:
                if self._ended is not None:
                    raise EngineStopped(self._ended)
                if len(self._streams) <= self._num_preparing:
                    self._moved_s = self._clock()
                self._streams |= dict.fromkeys(left, stream)
                self._send(AddRequests(requests, stream.added_s))
            while (event := await stream.read()) is not None:
                if event.request_id not in left:
                    with self._lock:
                        self._streams.pop(event.request_id, None)
                yield event
        finally:
            for request_id in tuple(left):
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """End one request early: its stream goes on with its others, or ends. Unknown and finished ids are fine."""
        with self._lock:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self._send(CancelRequest(request_id))
        if stream is not None:
            stream.choices_left.pop(request_id, None)
            self._post(stream.loop, [(stream, request_id)])

    # ---- from the driver --------------------------------------------------------------------------------------------

    def _take_report(self, report: StepReport) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        self._moved_s = self._clock()
        with self._lock:
            self._num_steps, self._num_preparing = report.num_steps, report.num_preparing
            for request_id, facts in report.facts.items():
                self._explained.setdefault(request_id, {}).update(facts)
            while len(self._explained) > max(_MAX_EXPLAINED, 2 * len(self._streams)):
                self._explained.popitem(last=False)
            for event in report.events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    by_loop[stream.loop].append((stream, event))
            for ended in report.ended:
                for failed in {stream for one in ended.request_ids if (stream := self._streams.get(one))}:
                    by_loop[failed.loop].append((failed, ended.error))
        for loop, items in by_loop.items():
            self._post(loop, items)

    def _post(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, _Item]]) -> None:
        try:
            loop.call_soon_threadsafe(self._put_all, items)
        except RuntimeError:  # the loop has closed: its streams will never be read
            with self._lock:
                for request_id in [i for i, stream in self._streams.items() if stream.loop is loop]:
                    del self._streams[request_id]
                    self._send(CancelRequest(request_id))

    def _put_all(self, items: list[tuple[_Stream, _Item]]) -> None:
        for stream, item in items:
            if isinstance(item, TokenEvent):
                if not stream.put(item):
                    self._give_up(stream)
            elif isinstance(item, str):
                stream.cancelled(item)
            else:
                # The end overtakes what was not read yet, so that a slow reader cannot delay a shutdown.
                stream.fail(item, at_once=isinstance(item, EngineStopped))

    def _give_up(self, stream: _Stream) -> None:
        """Compute nothing more for a client that does not read; its stream raises the reason when it is read."""
        with self._lock:
            for request_id in tuple(stream.choices_left):
                if self._streams.pop(request_id, None):
                    self._send(CancelRequest(request_id))

    def _end(self, why: str) -> None:
        """Refuse new requests and end open ones; the first reason stays."""
        with self._lock:
            self._ended = self._ended or why
            streams = set(self._streams.values())
            self._streams = {}
        for stream in streams:
            self._post(stream.loop, [(stream, EngineStopped(self._ended))])
