"""Tells the cache pool's members what each tenant may hold, and which namespaces are nobody's any more.

The key book is the only place where quotas are set: a change is noticed, and given to the members, within a second or
two. Members know namespaces by tags and forget quotas when they start again, so they are told anew from time to time.
"""

from __future__ import annotations

import asyncio
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
_TELL_AGAIN_ROUNDS = 5


class CacheQuotas:
    """`cache` must be its own: a client is for one thread at a time. Give `keep` to the server's event loop."""

    def __init__(self, cache: PoolClient, access: Access) -> None:
        self._cache, self._access = cache, access
        self._asking = asyncio.Lock()
        self._known: set[bytes] = set()
        self._told: dict[str, dict[bytes, int]] = {}
        self._rounds_left = 0

    async def keep(self) -> None:
        """For as long as the server runs."""
        while True:
            try:
                key_table = self._access.key_table
                if not self._access.is_open:
                    async with self._asking:  # members answer within bounds, but not on the event loop
                        await asyncio.to_thread(self.round, key_table)
            except KeyStoreError:
                pass  # whoever asks for tokens is told; the members keep what they have
            await asyncio.sleep(ROUND_S)

    def round(self, key_table: KeyTable) -> None:
        """Compare what members hold with who there is, and tell them what is new. Not on the event loop."""
        stats = self._cache.stats()
        there = {name: said for name, said in stats.items() if said is not None}
        if not there:
            return
        known = {namespace_tag(tenant.namespace) for tenant in key_table.tenants.values()}
        known.add(namespace_tag(PUBLIC_NAMESPACE))
        # Those that were somebody's may have blocks on disk alone; those that members hold may be late.
        nobodys = (self._known | {tag for said in there.values() for tag in said.held}) - known
        if nobodys:
            self._cache.purge_tags(sorted(nobodys))
        self._known = known
        slot_bytes = max(said.slot_bytes for said in there.values())
        num_slots = {name: said.num_slots for name, said in there.items()}
        table = tables(key_table.tenants.values(), list(stats), slot_bytes, num_slots)
        self._rounds_left -= 1
        if table != self._told or self._rounds_left <= 0:
            missing = self._cache.limit(table)
            self._told, self._rounds_left = (table if not missing else {}), _TELL_AGAIN_ROUNDS

    async def describe(self) -> dict[str, Any]:
        key_table = self._access.key_table
        async with self._asking:
            stats = await asyncio.to_thread(self._cache.stats)
        return described(key_table, stats)

    def close(self) -> None:
        self._cache.close()


def described(key_table: KeyTable, stats: dict[str, Stats | None]) -> dict[str, Any]:
    """What `tripool cache stats` shows."""
    there = [said for said in stats.values() if said is not None]
    held: dict[bytes, int] = {}
    for said in there:
        for tag, slots in said.held.items():
            held[tag] = held.get(tag, 0) + slots * said.slot_bytes
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
                "away": said is None,
                **({} if said is None else {"bytes": said.num_slots * said.slot_bytes, "free": said.free}),
            }
            for name, said in stats.items()
        ],
        "bytes": sum(said.num_slots * said.slot_bytes for said in there),
        "hits": sum(said.hits for said in there),
        "misses": sum(said.misses for said in there),
        "evicted": sum(said.evicted for said in there),
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
