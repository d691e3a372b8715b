"""Bounds the memory of request bodies while they arrive: per body, per tenant, and in total."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request as HttpRequest

from tripool.errors import Overloaded
from tripool.gateway.auth import caller_of
from tripool.gateway.body import read_body

_FREE_BYTES = 2**16
"""Bytes per body that are not counted: a short body is never refused, and connections are bounded."""
_MAX_HELD_BYTES = 256 * 2**20
_TENANTS_PART = 4
"""One tenant may hold a quarter, so that its slow senders do not shut out the others."""


class Bodies:
    """For one event loop. `max_bytes`: of each body."""

    def __init__(self, max_bytes: int, *, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._max_bytes, self._max_held_bytes = max_bytes, max_held_bytes
        self._held_bytes: Counter[str] = Counter()
        """By tenant."""

    async def read(self, http: HttpRequest) -> bytes:
        tenant, held = caller_of(http).tenant.name, 0

        def hold(size: int) -> None:
            nonlocal held
            more = max(0, size - _FREE_BYTES) - held
            self._check(tenant, more)
            self._held_bytes[tenant] += more
            held += more

        try:
            return await read_body(http, self._max_bytes, hold=hold)
        finally:
            self._held_bytes[tenant] -= held
            if not self._held_bytes[tenant]:
                del self._held_bytes[tenant]

    def _check(self, tenant: str, more: int) -> None:
        if more and (
            self._held_bytes[tenant] + more > self._max_held_bytes // _TENANTS_PART
            or self._held_bytes.total() + more > self._max_held_bytes
        ):
            raise Overloaded("too many large requests arrive at once", hint="send fewer at a time")
