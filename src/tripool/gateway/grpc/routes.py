"""The paths under which the application answers calls. Over HTTP they do not exist."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tripool.gateway.grpc import GENERATE, REFLECT

IS_CALL = "tripool.grpc"
"""Key in the scope of a call."""


def grpc_routes(answer: Callable[[HttpRequest], Awaitable[Response]]) -> APIRouter:
    routes = APIRouter()

    @routes.post(GENERATE, include_in_schema=False)
    async def generate(http: HttpRequest) -> Response:
        _check(http)
        return await answer(http)

    @routes.post(REFLECT, include_in_schema=False)
    async def reflect(http: HttpRequest) -> Response:
        """Admits the caller; what is reflected is not the application's."""
        _check(http)
        return Response()

    return routes


def _check(http: HttpRequest) -> None:
    if IS_CALL not in http.scope:
        raise HTTPException(404)
