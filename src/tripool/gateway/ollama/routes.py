"""Ollama's routes about models: which there are, one of them, and the version."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from tripool import __version__
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs, decode_json
from tripool.gateway.ollama.parse import SHOW, model_of

if TYPE_CHECKING:
    from tripool.gateway.models import Models, Served


def ollama_routes(models: Models, bodies: Bodies) -> APIRouter:
    routes = APIRouter()
    started = datetime.fromtimestamp(int(time.time()), UTC).isoformat()
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
    details |= {"quantization_level": ""}

    def listed(served: Served) -> dict[str, Any]:
        digest = sha256(served.name.encode()).hexdigest()  # of the name: clients use it as an id
        names = {"name": served.name, "model": served.name, "modified_at": started}
        return {**names, "size": 0, "digest": digest, "details": details}

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [listed(served) for served in models]}

    @routes.get("/api/ps")
    async def running() -> dict[str, Any]:
        """Models in memory."""
        ready = [one for one in models if models.control.describe(one.name)["state"] == "ready"]
        return {"models": [{**listed(one), "context_length": one.backend.context_tokens} for one in ready]}

    @routes.post("/api/show", openapi_extra=body_docs(SHOW.schema()))
    async def show(http: HttpRequest) -> dict[str, Any]:
        served = models.find(model_of(SHOW.checked(decode_json(await bodies.read(http)))))
        facts = {"general.architecture": "tripool", "tripool.context_length": served.backend.context_tokens}
        shown = {"modelfile": "", "parameters": "", "template": "", "details": details, "model_info": facts}
        return {**shown, "modified_at": started, "capabilities": ["completion", "tools", "thinking"]}

    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return routes
