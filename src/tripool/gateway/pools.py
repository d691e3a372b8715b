"""`/v1/pools`: workers, requests by stage, cache members, instances and hosts, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter

from tripool.cache.client import PoolClient
from tripool.cache.wire import Stats
from tripool.gateway.coordinator_link import CoordinatorLink
from tripool.gateway.instances import Instances


def pools_routes(
    link: CoordinatorLink,
    cache: PoolClient,
    instances: Instances,
    hosts: Callable[[], list[dict[str, Any]]] = list,
    places: Sequence[object] = (),
) -> APIRouter:
    """`cache`: asked for its members' counters, never for blocks. `hosts`: the machines of this server, if several.
    `places`: where its own workers run, and why."""
    routes = APIRouter()
    asking, placed = asyncio.Lock(), msgspec.to_builtins(places)

    @routes.get("/v1/pools")
    async def show() -> dict[str, Any]:
        """Workers, their load, requests by stage, and the cache pool's members."""
        pools: dict[str, Any] = msgspec.json.decode(await link.ask("pools"))
        async with asking:  # it answers within bounds, but one question at a time and not on the event loop
            counters = await asyncio.to_thread(cache.stats)
            ranks = await asyncio.to_thread(instances.describe)
        members = [_member(name, stats) for name, stats in counters.items()]
        return pools | {"cache": members, "instances": ranks, "hosts": hosts(), "places": placed}

    return routes


def _member(name: str, stats: Stats | None) -> dict[str, Any]:
    if stats is None:
        return {"member": name, "away": True}
    counts = ("committed", "reserved", "leases", "hits", "misses", "evicted", "bad")
    return {
        "member": name,
        "away": False,
        "slots": stats.num_slots,
        **{count: getattr(stats, count) for count in counts},
        "disk": None if stats.disk is None else msgspec.structs.asdict(stats.disk),
    }
