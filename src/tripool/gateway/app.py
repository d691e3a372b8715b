"""The HTTP application: routes, and the shape that every refusal gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tripool import __version__
from tripool.config import GatewayConfig
from tripool.errors import EngineStopped, ModelNotFound, TripoolError
from tripool.gateway.backend import Backend
from tripool.gateway.body import read_body
from tripool.gateway.options import CHAT, COMPLETION, schema
from tripool.gateway.parse import Job, Parser
from tripool.gateway.respond import Shapes, error_body, error_shape
from tripool.gateway.stream import AnswerResponse
from tripool.text import Tokenizer


def create_app(backend: Backend, tokenizer: Tokenizer, name: str, config: GatewayConfig) -> FastAPI:
    """The OpenAI surface of one model, served by `backend` under `name`."""
    app = FastAPI(title="Tripool", version=__version__)
    parser = Parser(tokenizer, name)
    started_s = int(time.time())

    async def answer(http: HttpRequest, parse: Callable[[bytes], Job]) -> Response:
        raw = await read_body(http, config.max_body_bytes)
        job = await asyncio.to_thread(parse, raw)
        shapes = Shapes(job, tokenizer, model=name, created_s=int(time.time()))
        return AnswerResponse(job, backend, tokenizer, shapes)

    @app.post("/v1/chat/completions", openapi_extra=_body_docs(schema(CHAT, "messages")))
    async def chat_completions(http: HttpRequest) -> Response:
        return await answer(http, parser.chat)

    @app.post("/v1/completions", openapi_extra=_body_docs(schema(COMPLETION, "prompt")))
    async def completions(http: HttpRequest) -> Response:
        return await answer(http, parser.completion)

    model = {"id": name, "object": "model", "created": started_s, "owned_by": "tripool"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        if model_id != name:
            raise ModelNotFound(f"there is no model '{model_id[:100]}'", hint=f"this server has '{name}'")
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        """For load balancers: 200 while requests are served, 503 after."""
        if not backend.alive:
            raise EngineStopped("the engine has stopped", hint="restart the server")
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    _shape_errors(app)
    return app


def _body_docs(body: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _shape_errors(app: FastAPI) -> None:
    @app.exception_handler(TripoolError)
    async def refused(http: HttpRequest, error: TripoolError) -> Response:
        return JSONResponse(error_shape(error), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def no_such_route(http: HttpRequest, error: HTTPException) -> Response:
        body = error_body(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def our_mistake(http: HttpRequest, error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server's log has the whole story.
        body = error_body(500, "the server made a mistake; its log says more", code=TripoolError.code)
        return JSONResponse(body, status_code=500)
