"""The stream of token events from a backend to the one consumer that reads them: a bounded buffer.

A `Watcher` accounts for tokens when they are put in, not when they are read: tokens generated for a client that never
reads them were computed all the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from tripool.core import Request, TokenEvent
from tripool.errors import SlowReader, TripoolError

MAX_UNREAD = 2**18
"""Unread tokens and top log-probabilities per reader: some tens of megabytes."""

_TOGETHER = 32
"""Tokens of a background answer that are read at once: it is not seen before its end, and to wake a reader for each
token costs as much as the token's text."""

_Item = TokenEvent | TripoolError | None
"""None only wakes the consumer: one of its requests was cancelled."""


class Watcher:
    """Callbacks for every token before it is read, on the consumer's event loop. The default does nothing."""

    max_unread: float = MAX_UNREAD
    """Beyond it the stream ends with SlowReader. May change: infinite while the delay is not the client's."""

    def made(self, event: TokenEvent) -> None:
        """A token was generated; it may never be read."""

    def over(self, request_id: str) -> None:
        """No more tokens will be generated for the request; some may be unread. May be called again."""


class Tally(Watcher):
    """Counts generated tokens."""

    def __init__(self, max_unread: float = MAX_UNREAD) -> None:
        self.max_unread = max_unread
        self.num_made: dict[str, int] = {}
        """Tokens, by request."""
        self.num_cached: dict[str, int] = {}
        """Cached prompt tokens, from the request's first event."""

    def made(self, event: TokenEvent) -> None:
        request_id = event.request_id
        if request_id in self.num_made:
            self.num_made[request_id] += 1
        else:
            self.num_made[request_id] = 1
            self.num_cached[request_id] = event.num_cached_tokens


class TokenStream:
    """Events of one or several requests; used on the consumer's event loop only."""

    def __init__(self, requests: Iterable[Request], watcher: Watcher | None = None, now_s: float = 0.0) -> None:
        requests = tuple(requests)
        self.added_s = now_s
        # A stop string is found by who reads: then every token is read at once.
        gathers = all(request.slo.background and not request.params.stop for request in requests)
        self._together = _TOGETHER if gathers else 1
        self._num_read = 0
        self.choices_left = {request.id: request.params.n for request in requests}
        """Choices per request whose end was not read yet."""
        self._to_make = dict(self.choices_left)
        """Choices per request whose end was not generated yet."""
        self._watcher = watcher or Watcher()
        self._items: deque[_Item] = deque()
        self._num_unread = 0
        self._failed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> bool:
        """False, once, when too much is unread: the stream ends with SlowReader and no more should be generated."""
        self._watcher.made(event)
        if event.finish_reason is not None:
            self._made_last(event.request_id)
        if self._failed:
            return True
        self._num_unread += _size(event)
        if self._num_unread > self._watcher.max_unread:
            hint = "read faster, or ask for fewer choices or log-probabilities"
            self.fail(SlowReader(f"{len(self._items)} tokens of this answer were not read", hint=hint), at_once=True)
            return False
        self._append(event)
        return True

    def fail(self, error: TripoolError, *, at_once: bool = False) -> None:
        """End the stream with an error, after the unread items, or `at_once`: then they are dropped."""
        self._failed = True
        for request_id in tuple(self._to_make):
            self._over(request_id)
        if at_once:
            self._items.clear()
        self._append(error)

    def cancelled(self, request_id: str) -> None:
        self.choices_left.pop(request_id, None)
        self._over(request_id)
        self._append(None)

    async def read(self) -> TokenEvent | None:
        """The next event; None once all requests are over. Raises what the stream failed with."""
        # One reader, and no more bookkeeping than one needs: every token of every stream passes here.
        left = self.choices_left
        while left:
            if self._items and not self._num_read % self._together:
                # Neither this nor a fast client's send() would give way: a backlog must not starve other tasks.
                await asyncio.sleep(0)
            self._num_read += 1
            while not self._items:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            item = self._items.popleft()
            if isinstance(item, TripoolError):
                raise item
            if item is None:
                continue
            self._num_unread -= _size(item)
            if item.request_id not in left:
                continue  # the event was on its way when its request was cancelled
            if item.finish_reason is not None:
                left[item.request_id] -= 1
                if left[item.request_id] == 0:
                    del left[item.request_id]
            return item
        return None

    def _append(self, item: _Item) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done() and self._is_due(item):
            self._waiter.set_result(None)

    def _is_due(self, item: _Item) -> bool:
        """Whether the reader wakes for it. It does for a first token, whose time is noted."""
        is_inner = isinstance(item, TokenEvent) and item.index > 0 and item.finish_reason is None
        return not is_inner or len(self._items) >= self._together

    def _made_last(self, request_id: str) -> None:
        left = self._to_make.get(request_id, 0) - 1
        if left > 0:
            self._to_make[request_id] = left
        else:
            self._over(request_id)

    def _over(self, request_id: str) -> None:
        if self._to_make.pop(request_id, None) is not None:
            self._watcher.over(request_id)


def _size(event: TokenEvent) -> int:
    return 1 if event.logprobs is None else 1 + len(event.logprobs.top)
