"""Operator routes: health, readiness, load, metrics, drain, explain."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tripool import __version__
from tripool.errors import EngineStopped
from tripool.gateway.auth import caller_of
from tripool.gateway.coordinator_link import NoCoordinator
from tripool.gateway.metrics import scrape, scrape_own
from tripool.gateway.models import Models, OpenRequests
from tripool.gateway.peers import Peers
from tripool.gateway.record import MAX_KEPT, Journal
from tripool.gateway.refusals import Draining, NotReady, RequestUnknown


class InFlight(OpenRequests):
    """Of all models of this gateway, which may be draining with its server."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._draining, self._peers = False, peers

    @property
    def draining(self) -> bool:
        return self._draining or self._peers.draining

    async def drain(self, draining: bool) -> None:
        """The whole server. One whose coordinator is away drains here at least."""
        self._draining = draining
        await self._peers.drain(draining)
        self._draining = draining and not self._peers.draining  # all gateways know it from the coordinator

    def check(self) -> None:
        if self.draining:
            raise Draining("this server accepts no more requests", hint="send it to another one, or later")


_LOG = logging.getLogger("tripool.gateway")


def admin_routes(models: Models, in_flight: InFlight, journal: Journal, peers: Peers, *, stall_s: float) -> APIRouter:
    """`stall_s`: longest time with work but without a step before the server reports itself as not ready."""
    routes = APIRouter()
    _add_health(routes, models, in_flight, stall_s)
    _add_load(routes, models, in_flight, peers)
    _add_drain(routes, in_flight, peers)
    _add_explain(routes, journal, peers)
    return routes


def _add_health(routes: APIRouter, models: Models, in_flight: InFlight, stall_s: float) -> None:
    @routes.get("/health")
    @routes.get("/ping")
    async def health() -> dict[str, str]:
        """Liveness: 200 while requests can be served, 503 after."""
        if not models.alive:
            raise EngineStopped("the engine has stopped", hint="restart the server")
        return {"status": "ok"}

    @routes.get("/health/ready")
    async def ready() -> dict[str, str]:
        """Readiness: 503 while draining, without workers, and when there is work but no progress."""
        await health()
        if in_flight.draining:
            raise NotReady("draining", hint="send requests elsewhere")
        stats = models.stats()
        if stats.missing:
            raise NotReady(stats.missing, hint="wait for one, or see the log")
        stalled_s = stats.stalled_s
        if stalled_s > stall_s:
            raise NotReady(
                f"no step for {stalled_s:.1f} s while requests wait", hint="restart the server if this persists"
            )
        return {"status": "ready"}

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_load(routes: APIRouter, models: Models, in_flight: InFlight, peers: Peers) -> None:
    async def own_load(_: object) -> int:
        return in_flight.num_open

    async def own_metrics(_: object) -> str:
        return scrape_own([one.metrics for one in models])

    peers.answer("load", own_load)
    peers.answer("metrics", own_metrics)

    @routes.get("/load")
    async def load() -> dict[str, Any]:
        stats = models.stats()
        return {
            "server_load": await _open_requests(in_flight, peers),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_usage,
            "draining": in_flight.draining,
        }

    @routes.get("/metrics")
    async def prometheus() -> Response:
        others = await peers.ask("metrics")
        return Response(scrape([one.metrics for one in models], others), headers={"content-type": CONTENT_TYPE_LATEST})


async def _open_requests(in_flight: InFlight, peers: Peers) -> int:
    """At all gateways."""
    others: list[int] = await peers.ask("load")
    return in_flight.num_open + sum(others)


def _add_drain(routes: APIRouter, in_flight: InFlight, peers: Peers) -> None:
    async def drained(draining: bool) -> dict[str, Any]:
        if in_flight.draining != draining:
            _LOG.info("draining" if draining else "no longer draining", extra={"open": in_flight.num_open})
        await in_flight.drain(draining)
        return await state()

    async def state() -> dict[str, Any]:
        return {"draining": in_flight.draining, "open_requests": await _open_requests(in_flight, peers)}

    @routes.post("/drain")
    async def drain(resume: Annotated[bool, Query()] = False) -> dict[str, Any]:
        """Refuse new requests and finish the open ones; returns how many there are. `?resume=true` undoes it."""
        return await drained(not resume)

    @routes.delete("/drain")
    async def undrain() -> dict[str, Any]:
        return await drained(False)

    @routes.get("/drain")
    async def draining() -> dict[str, Any]:
        return await state()


def _add_explain(routes: APIRouter, journal: Journal, peers: Peers) -> None:
    async def known(about: dict[str, Any]) -> dict[str, Any] | None:
        """`admin`: the request may be anyone's."""
        name: str = about["id"]
        record = journal.find_anyones(name) if about["admin"] else journal.find(name, about["tenant"])
        if record is None:
            return None
        with suppress(NoCoordinator):  # then what is known here
            await record.learn()
        return record.explain()

    peers.answer("explain", known)

    @routes.get("/v1/requests/{request_id}/explain")
    async def explain(request_id: str, http: HttpRequest) -> dict[str, Any]:
        """Where a request's time went, what it cost and where it ran. Tenants see only their own requests."""
        caller = caller_of(http)
        about = {"id": request_id, "admin": caller.admin, "tenant": caller.tenant.name}
        found: dict[str, Any] | None = await known(about) or await peers.find("explain", about)
        if found is None:
            hint = f"the last {MAX_KEPT} are remembered, under the answer's id or the X-Request-Id"
            raise RequestUnknown(f"there is no request '{request_id[:100]}'", hint=hint)
        return found
