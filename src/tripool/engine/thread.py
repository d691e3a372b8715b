"""Engine thread: owns an engine and passes its token events to asyncio tasks. Knows no HTTP and no text.

| thread | does |
|---|---|
| any event loop | puts commands (add, cancel, stop), awaits its own queue |
| the engine's thread | takes commands, steps, posts events: one wake-up per loop and step, not per token |

A fault of one request ends its stream with RequestFailed, and no other. The end of the thread ends every open stream
with EngineStopped, so that no client waits for tokens that cannot come.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.engine_protocol import StepEngine
from tripool.errors import EngineStopped, RequestFailed, TripoolError
from tripool.token_stream import TokenStream, Watcher

_Item = TokenEvent | TripoolError | str
"""A token, an error, or the id of a cancelled request."""

_MAX_EXPLAINED = 1000
_MAX_ADDED = 64
"""Choices added between two steps, those of the last request not counted: running sequences wait for them."""
_SHUT_DOWN = "the engine is shut down"

_logger = logging.getLogger("tripool.engine")


class _Stream(TokenStream):
    """One consumer, and its event loop. The times belong to the engine's thread."""

    def __init__(self, requests: tuple[Request, ...], watcher: Watcher | None, now_s: float) -> None:
        super().__init__(requests, watcher, now_s)
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.started_s: dict[str, float] = {}
        """When the first step with each request began."""
        self.grammars: set[Future[Any]] = set()
        """Held while the stream is open, so that what was compiled for it is there when it is added."""

    def staged(self, event: TokenEvent, now_s: float) -> TokenEvent:
        """A choice's first event, with the time that it took to get here."""
        started_s = self.started_s.get(event.request_id, self.added_s)
        return replace(event, stages=Stages(queue_s=started_s - self.added_s, prefill_s=now_s - started_s))


class EngineThread:
    """`stream()` and `cancel()` from any event loop, `close()` and the rest from anywhere."""

    def __init__(self, engine: StepEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self.context_tokens = engine.context_tokens
        self._clock = clock
        self._num_steps = 0
        self._moved_s = clock()
        """When the last step ended, or work came after there was none."""
        self._commands: SimpleQueue[_Stream | str | None] = SimpleQueue()
        """A stream to add, a request id to cancel, or None to stop."""
        self._lock = threading.Lock()
        """Guards the fields below: close() must be able to end streams while a step hangs."""
        self._streams: dict[str, _Stream] = {}
        self._preparing: set[str] = set()
        """Those of them that are not passed to the engine yet."""
        self._ended: str | None = None
        """Why nothing is served any more."""
        self._explained: OrderedDict[str, dict[str, str | int | float]] = OrderedDict()
        """Facts of the last requests, for `explain`."""
        self._held_by = ""
        """The limit that bounded the last step."""
        self._thread = threading.Thread(target=self._main, name="tripool-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._ended is None

    def stats(self) -> ServingStats:
        waited_for = len(self._streams) > len(self._preparing)
        stalled_s = max(0.0, self._clock() - self._moved_s) if waited_for else 0.0
        return replace(self._engine.stats(), num_steps=self._num_steps, stalled_s=stalled_s)

    def explain(self, request_id: str) -> Mapping[str, str | int | float]:
        """The load that it found, and the limit that held it back."""
        with self._lock:
            return {"mode": "colocated", "engine": self._engine.name, **self._explained.get(request_id, {})}

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of one or several requests until all are over. Leaving early, in any way, cancels the rest.

        Raises what the engine's `add` raises, in which case none of the requests runs.
        """
        stream = _Stream(requests, watcher, self._clock())
        left = stream.choices_left
        with self._lock:
            if self._ended is not None:
                raise EngineStopped(self._ended)
            self._streams |= dict.fromkeys(left, stream)
            self._preparing.update(left)
        try:
            await self._prepare(stream)
            self._hand_over(stream)
            while (event := await stream.read()) is not None:
                if event.request_id not in left:
                    with self._lock:
                        self._streams.pop(event.request_id, None)
                yield event
        finally:
            for request_id in tuple(left):
                self.cancel(request_id)

    async def _prepare(self, stream: _Stream) -> None:
        """The request waits for its grammar, not the engine. Errors of the grammar are raised when it is added."""
        stream.grammars = {future for request in stream.requests if (future := self._engine.prepare(request))}
        under_way = [asyncio.wrap_future(future) for future in stream.grammars if not future.done()]
        if under_way:
            await asyncio.wait(under_way)  # which does not cancel them: others may wait for the same
            for done in under_way:
                done.exception()  # raised again when it is added

    def _hand_over(self, stream: _Stream) -> None:
        """Queue what was not cancelled meanwhile. Under the lock: a cancel comes before, or its command after."""
        with self._lock:
            stream.requests = tuple(request for request in stream.requests if request.id in self._streams)
            if not stream.requests:
                return
            if len(self._streams) == len(self._preparing):
                self._moved_s = self._clock()
            self._preparing.difference_update(request.id for request in stream.requests)
            self._commands.put(stream)

    def cancel(self, request_id: str) -> None:
        """End one request early: its stream goes on with its others, or ends. Unknown and finished ids are fine."""
        with self._lock:
            stream = self._streams.pop(request_id, None)
            self._preparing.discard(request_id)
        if stream is not None:
            stream.choices_left.pop(request_id, None)
            self._commands.put(request_id)
            self._post(stream.loop, [(stream, request_id)])

    def close(self, timeout_s: float) -> bool:
        """Stop after the step in progress and end open streams; False when the engine did not stop in time.

        Also then every stream is ended: a step that hangs holds only its own thread.
        """
        self._commands.put(None)
        self._thread.join(timeout_s)
        self._end(_SHUT_DOWN)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End open streams without waiting for the step in progress."""
        self.close(0)

    def _main(self) -> None:
        try:
            while self._obey():
                if self._engine.busy:
                    self._step()
            for request_id in self._end(_SHUT_DOWN):
                self._engine.cancel(request_id)
        finally:  # not an except: a failure goes on to the thread's own hook, which prints it
            # Clients get only the kind of failure: its text may contain words of another request.
            self._end(f"the engine failed: {type(sys.exception()).__name__}")

    def _obey(self) -> bool:
        """Carry out the queued commands, waiting for one when the engine is idle.

        Stops after `_MAX_ADDED` choices: running sequences get their step in between.
        """
        num_added = 0
        try:
            command = self._commands.get(block=not self._engine.busy)
            while command is not None:
                if isinstance(command, _Stream):
                    self._add(command)
                    num_added += sum(request.params.n for request in command.requests)
                else:
                    self._engine.cancel(command)
                if num_added >= _MAX_ADDED and self._engine.busy:
                    return True
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _add(self, stream: _Stream) -> None:
        """All requests of a stream or none."""
        found = self._engine.stats()
        for position, request in enumerate(stream.requests):
            self._note_load(request.id, found)
            try:
                self._engine.add(request)
            except TripoolError as refused:
                self._refuse(stream, position, refused)
                return
            except Exception:
                _logger.exception("request %s could not be added", request.id)
                self._refuse(stream, position + 1, RequestFailed.of(request.id))
                return

    def _refuse(self, stream: _Stream, num_added: int, error: TripoolError) -> None:
        for added in stream.requests[:num_added]:
            self._engine.cancel(added.id)
        self._post(stream.loop, [(stream, error)])

    def _note_load(self, request_id: str, found: ServingStats) -> None:
        with self._lock:
            self._explained[request_id] = {
                "found running": found.running,
                "found waiting": found.waiting,
                "found KV in use": f"{100 * found.kv_usage:.0f} %",
            }
            while len(self._explained) > max(_MAX_EXPLAINED, 2 * len(self._streams)):
                self._explained.popitem(last=False)

    def _note_wait(self, request_id: str, waited_s: float) -> None:
        """A request that did not start in the last step waited for the limit of that step."""
        facts = self._explained.get(request_id)
        if facts is not None:
            limit = self._held_by or "the step under way"
            facts[f"held back: {limit}"] = f"{1e3 * waited_s:.1f} ms"

    def _step(self) -> None:
        begun_s = self._clock()
        events = self._engine.step()
        self._moved_s = self._clock()
        self._num_steps += 1
        started = self._engine.started
        if started:
            with self._lock:
                for request_id in started:
                    if request_id in self._streams:
                        stream = self._streams[request_id]
                        stream.started_s[request_id] = begun_s
                        self._note_wait(request_id, begun_s - stream.added_s)
        self._held_by = self._engine.stats().held_by
        self._deliver(events)
        for request_id in self._engine.take_failed():
            with self._lock:
                failed = self._streams.get(request_id)
            if failed is not None:
                self._post(failed.loop, [(failed, RequestFailed.of(request_id))])

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        with self._lock:
            for event in events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    item = stream.staged(event, self._moved_s) if event.index == 0 else event
                    by_loop[stream.loop].append((stream, item))
        for loop, items in by_loop.items():
            self._post(loop, items)

    def _post(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, _Item]]) -> None:
        try:
            loop.call_soon_threadsafe(self._put_all, items)
        except RuntimeError:  # the loop has closed: its streams will never be read
            with self._lock:
                orphans = [i for i, stream in self._streams.items() if stream.loop is loop]
                for request_id in orphans:
                    del self._streams[request_id]
                self._preparing.difference_update(orphans)
            for request_id in orphans:
                self._commands.put(request_id)

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
            given_up = [request_id for request_id in tuple(stream.choices_left) if self._streams.pop(request_id, None)]
        for request_id in given_up:
            self._commands.put(request_id)

    def _end(self, why: str) -> list[str]:
        """Refuse new requests and end open ones; the first reason stays. Returns the requests that were open."""
        with self._lock:
            self._ended = self._ended or why
            ended, streams = list(self._streams), set(self._streams.values())
            self._streams = {}
            self._preparing.clear()
        for stream in streams:
            self._post(stream.loop, [(stream, EngineStopped(self._ended))])
        return ended
