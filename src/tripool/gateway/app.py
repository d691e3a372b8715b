"""The HTTP application: routes, and the shape that every refusal gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tripool import __version__
from tripool.answer import Answer
from tripool.config import GatewayConfig
from tripool.errors import ModelNotFound, TripoolError
from tripool.gateway.admin import admin_routes
from tripool.gateway.anthropic.respond import MessageShapes
from tripool.gateway.backend import Backend
from tripool.gateway.body import body_docs, read_body
from tripool.gateway.gate import Gate
from tripool.gateway.job import Job
from tripool.gateway.metrics import Metrics
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION
from tripool.gateway.parse import Parser, header_id
from tripool.gateway.record import Journal, Record
from tripool.gateway.refusals import dialect_of, error_body, error_headers, error_shape
from tripool.gateway.respond import Shapes, Voice
from tripool.gateway.stream import AnswerResponse
from tripool.gateway.tokens import TokenService, token_routes
from tripool.text import Tokenizer

Parse = Callable[[bytes, str | None], Job]

_SHORT_BYTES = 4096
"""Parsed in well under a millisecond: handing it to another thread and back would take longer."""


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    name: str,
    config: GatewayConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """One model, served by `backend` under `name`: OpenAI's surface, Anthropic's, and the operator's."""
    app = FastAPI(title="Tripool", version=__version__)
    parser = Parser(tokenizer, name)
    gate, journal = Gate(), Journal()
    metrics = Metrics(name, backend.stats, lambda: gate.num_inside)
    app.include_router(admin_routes(backend, gate, metrics, journal, stall_s=config.stall_s))
    service = TokenService(parser, tokenizer, lambda: backend.context_tokens)
    app.include_router(token_routes(service, config.max_body_bytes))
    app.include_router(_model_routes(name, lambda: backend.context_tokens))

    async def answer(http: HttpRequest, parse: Parse) -> Response:
        received_s = clock()
        gate.check()
        with gate.inside():
            raw = await read_body(http, config.max_body_bytes)
            request_id = header_id(http.headers.get("x-request-id"))
            if len(raw) <= _SHORT_BYTES:
                job = parse(raw, request_id)
            else:
                job = await asyncio.to_thread(parse, raw, request_id)
            structure = job.requests[0].params.structure
            if structure is not None:
                await asyncio.to_thread(parser.check, structure)
        created_s = int(time.time())
        answers = [Answer(request, tokenizer) for request in job.requests]
        voice: Voice = (
            MessageShapes(job, model=name)
            if job.api == "messages"
            else Shapes(job, tokenizer, answers, model=name, created_s=created_s)
        )
        record = Record(job, clock, received_s=received_s, created_s=created_s, on_gaps=metrics.gaps)
        journal.keep(record)
        return AnswerResponse(job, backend, answers, voice, record, inside=gate.inside, on_end=metrics.ended)

    @app.post("/v1/chat/completions", openapi_extra=body_docs(CHAT.schema()))
    async def chat_completions(http: HttpRequest) -> Response:
        return await answer(http, parser.chat)

    @app.post("/v1/completions", openapi_extra=body_docs(COMPLETION.schema()))
    async def completions(http: HttpRequest) -> Response:
        return await answer(http, parser.completion)

    @app.post("/v1/messages", openapi_extra=body_docs(ANTHROPIC.schema()))
    async def messages(http: HttpRequest) -> Response:
        return await answer(http, parser.messages)

    _shape_errors(app, metrics)
    return app


def _model_routes(name: str, context_tokens: Callable[[], int]) -> APIRouter:
    routes = APIRouter()
    started_s = int(time.time())

    def model() -> dict[str, Any]:
        head = {"id": name, "object": "model", "created": started_s, "owned_by": "tripool"}
        return head | {"max_model_len": context_tokens()}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @routes.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        if model_id != name:
            raise ModelNotFound(f"there is no model '{model_id[:100]}'", hint=f"this server has '{name}'")
        return model()

    return routes


def _shape_errors(app: FastAPI, metrics: Metrics) -> None:
    def shaped(http: HttpRequest, status: int, body: dict[str, Any], headers: Any = None) -> Response:
        asked = header_id(http.headers.get("x-request-id"))
        named = {} if asked is None else {"x-request-id": asked}
        return JSONResponse(body, status_code=status, headers={**(headers or {}), **named})

    @app.exception_handler(TripoolError)
    async def refused(http: HttpRequest, error: TripoolError) -> Response:
        metrics.refused(error.code)
        return shaped(http, error.status, error_shape(error, dialect_of(http.url.path)), error_headers(error))

    @app.exception_handler(RequestValidationError)
    async def wrong_query(http: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])[:100]
        return shaped(http, 400, error_body(400, f"'{param}': {first['msg']}", code="invalid_request", param=param))

    @app.exception_handler(HTTPException)
    async def no_such_route(http: HttpRequest, error: HTTPException) -> Response:
        message, dialect = f"{http.method} {http.url.path}: {error.detail}", dialect_of(http.url.path)
        return shaped(http, error.status_code, error_body(error.status_code, message, dialect=dialect), error.headers)

    @app.exception_handler(Exception)
    async def our_mistake(http: HttpRequest, error: Exception) -> Response:
        # Starlette raises it again after this answer, so the server's log has the whole story.
        message, dialect = "the server made a mistake; its log says more", dialect_of(http.url.path)
        return shaped(http, 500, error_body(500, message, code=TripoolError.code, dialect=dialect))
