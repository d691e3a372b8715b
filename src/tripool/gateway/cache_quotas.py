"""Distributes tenants' cache quotas to the cache members, and purges namespaces of removed tenants.

The key store is the only source of quotas; a change reaches the members within a second or two. Members know namespaces
by tags and lose quotas when they restart, so quotas are sent again from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from tripool.cache import PUBLIC_NAMESPACE, namespace_tag
from tripool.cache.client import PoolClient
from tripool.cache.wire import Stats
from tripool.gateway.auth import Access
from tripool.tenants import KeyTable
from tripool.tenants.key_store import KeyStoreError
from tripool.tenants.key_table import tables

ROUND_S = 1.0
_RESEND_ROUNDS = 5


class CacheQuotas:
    """`cache` must not be shared: a client is for one thread at a time. Run `keep` on the server's event loop."""

    def __init__(self, cache: PoolClient, access: Access) -> None:
        self._cache, self._access = cache, access
        self._asking = asyncio.Lock()
        self._known: set[bytes] = set()
        self._sent: dict[str, dict[bytes, int]] = {}
        self._rounds_left = 0

    async def keep(self, may: Callable[[], bool] = lambda: True) -> None:
        """Runs as long as the server. `may`: whether it is this gateway that does it."""
        while not may():
            await asyncio.sleep(ROUND_S)
        while True:
            try:
                key_table = self._access.key_table
                if not self._access.is_open:
                    async with self._asking:  # bounded, but blocking
                        await asyncio.to_thread(self.round, key_table)
            except KeyStoreError:
                pass  # requests are refused; the members keep their quotas
            await asyncio.sleep(ROUND_S)

    def round(self, key_table: KeyTable) -> None:
        """Compare the members' namespaces with the tenants and send changes. Blocking: not on the event loop."""
        stats = self._cache.stats()
        present = {name: one for name, one in stats.items() if one is not None}
        if not present:
            return
        known = {namespace_tag(tenant.namespace) for tenant in key_table.tenants.values()}
        known.add(namespace_tag(PUBLIC_NAMESPACE))
        # Namespaces of removed tenants may have blocks on disk only; those that members report may be new.
        removed = (self._known | {tag for one in present.values() for tag in one.held}) - known
        if removed:
            self._cache.purge(sorted(removed))
        self._known = known
        slot_bytes = max(one.slot_bytes for one in present.values())
        num_slots = {name: one.num_slots for name, one in present.items()}
        table = tables(key_table.tenants.values(), list(stats), slot_bytes, num_slots)
        self._rounds_left -= 1
        if table != self._sent or self._rounds_left <= 0:
            missing = self._cache.limit(table)
            self._sent, self._rounds_left = (table if not missing else {}), _RESEND_ROUNDS

    async def describe(self) -> dict[str, Any]:
        key_table = self._access.key_table
        async with self._asking:
            stats = await asyncio.to_thread(self._cache.stats)
        return described(key_table, stats)

    def close(self) -> None:
        self._cache.close()


def described(key_table: KeyTable, stats: dict[str, Stats | None]) -> dict[str, Any]:
    """The response of `GET /cache`, shown by `tripool cache stats`."""
    present = [one for one in stats.values() if one is not None]
    held: dict[bytes, int] = {}
    for one in present:
        for tag, slots in one.held.items():
            held[tag] = held.get(tag, 0) + slots * one.slot_bytes
    rows = [
        {
            "tenant": tenant.name,
            "held_bytes": held.pop(namespace_tag(tenant.namespace), 0),
            "quota_bytes": tenant.limits.cache_bytes,
        }
        for tenant in key_table.tenants.values()
    ]
    public = held.pop(namespace_tag(PUBLIC_NAMESPACE), 0)
    return {
        "members": [
            {
                "member": name,
                "away": one is None,
                **({} if one is None else {"bytes": one.num_slots * one.slot_bytes, "free": one.free}),
            }
            for name, one in stats.items()
        ],
        "bytes": sum(one.num_slots * one.slot_bytes for one in present),
        "hits": sum(one.hits for one in present),
        "misses": sum(one.misses for one in present),
        "evicted": sum(one.evicted for one in present),
        "tenants": rows,
        "public_bytes": public,
        "other_bytes": sum(held.values()),
    }


def cache_routes(quotas: CacheQuotas) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/cache")
    async def show() -> dict[str, Any]:
        """The cache pool: its members, and what each tenant holds of it."""
        return await quotas.describe()

    return routes
