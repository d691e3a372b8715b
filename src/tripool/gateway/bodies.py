"""Bounds the memory of request bodies while they arrive: per body, per tenant, and in total.

A gRPC message is handed over whole, and its size is not known before: while one arrives, as much as it may have is held
for it. Calls wait for that memory, because most messages are there at once; bodies over HTTP are refused, because they
are large.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest

from tripool.errors import Overloaded
from tripool.gateway.auth import caller_of
from tripool.gateway.body import read_body
from tripool.gateway.grpc.routes import IS_CALL

_FREE_BYTES = 2**16
"""Bytes per body that are not counted: a short body is never refused, and connections are bounded."""
_MAX_HELD_BYTES = 256 * 2**20
_MESSAGE_WAIT_S = 60.0
_TENANTS_PART = 4
"""One tenant may hold a quarter, so that its slow senders do not shut out the others."""


class Bodies:
    """For one event loop. `max_bytes`: of each body."""

    def __init__(self, max_bytes: int, *, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._max_bytes, self._max_held_bytes = max_bytes, max_held_bytes
        self._message_bytes = min(max_bytes, max_held_bytes // _TENANTS_PART)
        self._held_bytes: Counter[str] = Counter()
        """By tenant."""
        self._freed = asyncio.Event()
        """Set, and replaced, when some of it ends."""

    async def read(self, http: HttpRequest) -> bytes:
        tenant, held = caller_of(http).tenant.name, 0
        if IS_CALL in http.scope:
            async with self._message(tenant):
                return await read_body(http, self._max_bytes)

        def hold(size: int) -> None:
            nonlocal held
            more = max(0, size - _FREE_BYTES) - held
            self._check(tenant, more)
            self._held_bytes[tenant] += more
            held += more

        try:
            return await read_body(http, self._max_bytes, hold=hold)
        finally:
            self._free(tenant, held)

    @asynccontextmanager
    async def _message(self, tenant: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_MESSAGE_WAIT_S):
                while not self._has_room(tenant, self._message_bytes):
                    await self._freed.wait()
        except TimeoutError as error:
            raise Overloaded("too many messages arrive at once", hint="send fewer at a time") from error
        self._held_bytes[tenant] += self._message_bytes
        try:
            yield
        finally:
            self._free(tenant, self._message_bytes)

    def _free(self, tenant: str, held: int) -> None:
        self._held_bytes[tenant] -= held
        if not self._held_bytes[tenant]:
            del self._held_bytes[tenant]
        if held:
            self._freed.set()
            self._freed = asyncio.Event()

    def _has_room(self, tenant: str, more: int) -> bool:
        own, total = self._held_bytes[tenant] + more, self._held_bytes.total() + more
        return own <= self._max_held_bytes // _TENANTS_PART and total <= self._max_held_bytes

    def _check(self, tenant: str, more: int) -> None:
        if more and not self._has_room(tenant, more):
            raise Overloaded("too many large requests arrive at once", hint="send fewer at a time")
