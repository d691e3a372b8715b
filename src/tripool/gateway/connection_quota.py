"""Asks, for each request of a tenant, whether the tenant may keep one more connection busy. What everybody may see asks
for nothing: health checks are answered whoever holds how many."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tripool.errors import TripoolError
from tripool.gateway.auth import OPEN_PATHS
from tripool.gateway.connection_limits import CLAIM
from tripool.gateway.connection_table import Claim
from tripool.gateway.refusals import TenantConnections, TooManyConnections, dialect_of, error_headers, error_shape
from tripool.gateway.request_log import CALLER, note_error
from tripool.tenants import NOBODY, Caller

_HINT = "close some, or wait until one of your requests has ended"


class ConnectionQuota:
    """Behind the guard, which knows the tenant. `on_refused` is told the code."""

    def __init__(self, app: ASGIApp, *, on_refused: Callable[[str], object]) -> None:
        self._app, self._on_refused = app, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        claim: Callable[..., tuple[Claim, bool]] | None = scope.get(CLAIM)
        if scope["type"] == "http" and claim is not None and scope["path"] not in OPEN_PATHS:
            caller: Caller = scope.get(CALLER, NOBODY)
            verdict, whole = claim(caller.tenant.name, shared=caller != NOBODY)
            if verdict is not Claim.GRANTED:
                await self._refuse(verdict, whole, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse(self, verdict: Claim, whole: bool, scope: Scope, receive: Receive, send: Send) -> None:
        error: TripoolError = TooManyConnections("all connections are in use", hint="try again in a moment")
        if verdict is Claim.TENANT_FULL:
            error = TenantConnections("this key's requests keep as many connections busy as one tenant may", hint=_HINT)
        self._on_refused(error.code)
        note_error(scope, error.code)
        # While it still sends, hanging up would take the answer from it: what comes is dropped, within bounds.
        headers = error_headers(error) | ({"connection": "close"} if whole else {})
        body = error_shape(error, dialect_of(scope["path"]))
        await JSONResponse(body, status_code=error.status, headers=headers)(scope, receive, send)
