"""Routes of responses by id, and the count of a response's input tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tripool.errors import InvalidRequest
from tripool.gateway.auth import caller_of
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs
from tripool.gateway.fair_pool import FairPool
from tripool.gateway.responses.fields import INPUT_TOKENS
from tripool.gateway.responses.shared import SharedResponses
from tripool.gateway.responses.store import ResponseUnknown, Stored

if TYPE_CHECKING:
    from tripool.gateway.models import Models

_LEAST_SIZE = 1024
"""Added to the bytes of each body, so that many small ones are bounded too."""


def response_routes(models: Models, bodies: Bodies, pool: FairPool, shared: SharedResponses) -> APIRouter:
    routes, store = APIRouter(), shared.store

    def unknown(response_id: str) -> ResponseUnknown:
        hint = "it was deleted, or dropped in favour of newer ones"
        if not store.is_on:
            hint = "this server stores no responses; --response-store-mb gives it memory for them"
        return ResponseUnknown(f"there is no response '{response_id[:100]}'", hint=hint)

    async def stored(http: HttpRequest, response_id: str) -> Stored:
        found = await shared.find(caller_of(http).tenant.name, response_id)
        if found is None:
            raise unknown(response_id)
        return found

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, http: HttpRequest) -> Response:
        """A stored response, or one that is being generated."""
        if http.query_params.get("stream") == "true":
            raise InvalidRequest("a stored response is not streamed", hint="leave out 'stream'", param="stream")
        running = await shared.open_response(caller_of(http).tenant.name, response_id)
        return _json((await stored(http, response_id)).response if running is None else running)

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, http: HttpRequest) -> Response:
        if not await shared.delete(caller_of(http).tenant.name, response_id):
            raise unknown(response_id)
        return _json(msgspec.json.encode({"id": response_id, "object": "response.deleted", "deleted": True}))

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, http: HttpRequest) -> Response:
        """End a response that is being generated; its own stream ends too. One that has ended stays as it is."""
        running = await shared.open_response(caller_of(http).tenant.name, response_id, cancel=True)
        return _json((await stored(http, response_id)).response if running is None else running)

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, http: HttpRequest) -> Response:
        """What its own request sent, in the client's order; `?order=desc`, the default of OpenAI's, is the reverse."""
        items: list[Any] = msgspec.json.decode((await stored(http, response_id)).items)
        if http.query_params.get("order", "desc") != "asc":
            items.reverse()
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return _json(msgspec.json.encode({"object": "list", "data": items, "has_more": False, **ends}))

    @routes.post("/v1/responses/input_tokens", openapi_extra=body_docs(INPUT_TOKENS.schema()))
    async def input_tokens(http: HttpRequest) -> Response:
        """How many tokens such a request has."""
        tenant = caller_of(http).tenant
        await models.enter(tenant)
        raw = await bodies.read(http)
        models.read(tenant, len(raw))
        count: Callable[[], int] = lambda: models.meant_by(raw).parser.count_response(raw, store.history(tenant.name))  # noqa: E731

        async def counted() -> int:
            return await pool.run(tenant.name, count, size=len(raw) + _LEAST_SIZE)

        num_tokens = await shared.reading(tenant.name, counted)
        return _json(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": num_tokens}))

    return routes


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
