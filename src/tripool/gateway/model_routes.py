"""`/v1/models`: the models of a server, and loading and unloading them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs, decode_json
from tripool.gateway.models import Models, Served
from tripool.gateway.options import ONE_MODEL


def model_routes(models: Models, bodies: Bodies) -> APIRouter:
    routes = APIRouter()
    started_s = int(time.time())

    def shown(served: Served) -> dict[str, Any]:
        head = {"id": served.name, "object": "model", "created": started_s, "owned_by": "tripool"}
        facts = {"max_model_len": served.backend.context_tokens, "default": served is models.default}
        return head | facts | models.control.describe(served.name)

    async def named(http: HttpRequest) -> Served:
        return models.find(ONE_MODEL.checked(decode_json(await bodies.read(http)))["model"])

    @routes.get("/v1/models")
    async def all_models() -> dict[str, Any]:
        named = [shown(served) | {"id": name, "version": served.name} for name, served in models.names.items()]
        return {"object": "list", "data": named + [shown(served) for served in models]}

    @routes.post("/v1/models/load", openapi_extra=body_docs(ONE_MODEL.schema()))
    async def load(http: HttpRequest) -> dict[str, Any]:
        """Load a model; returns when it is ready, or with the error."""
        served = await named(http)
        await models.control.load(served.name)
        return shown(served)

    @routes.post("/v1/models/unload", openapi_extra=body_docs(ONE_MODEL.schema()))
    async def unload(http: HttpRequest) -> dict[str, Any]:
        """Finish a model's open answers and free its memory; it stays unloaded until it is loaded again."""
        served = await named(http)
        await models.control.unload(served.name)
        return shown(served)

    @routes.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        served = models.find(model_id)
        return shown(served) | ({} if served.name == model_id else {"id": model_id, "version": served.name})

    return routes
