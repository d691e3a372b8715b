"""Limits of one HTTP connection and of the connections of a tenant, and why a connection was cut off. No uvicorn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tripool.errors import TripoolError
from tripool.gateway.auth import OPEN_PATHS
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


SLOW_READER = "slow_reader"
"""Why a request was cancelled whose client does not take its answer."""
CONNECTION_END = "tripool.connection_end"
CLAIM = "tripool.claim"
"""Both in the scope of every request; the second is `Connection.claim`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_open: int = 4096
    head_bytes: int = 2**16
    num_headers: int = 100
    head_s: float = 10.0
    idle_s: float = 5.0
    unwanted_bytes: int = 8 * 2**20
    """Read and dropped: hanging up on a client that still sends would take the answer from it."""
    leftover_s: float = 5.0
    refused_s: float = 2.0
    frame_bytes: int = 16
    """Around each byte of a chunked body, besides `head_bytes`."""
    buffered_bytes: int = 2**16
    """Written and not yet taken by the system: the application waits when there is more."""
    taken_bytes: int = 2**14
    take_s: float = 30.0


class ConnectionEnd:
    """Why the server cut a connection off, for those who still answer on it. Empty: it did not.

    `cut` cuts it off for a reason that only those know.
    """

    def __init__(self, cut: Callable[[str], object] = lambda reason: None) -> None:
        self.reason = ""
        self.cut = cut


def cut_off_because(scope: Mapping[str, Any]) -> str | None:
    """None when the client went away by itself, or all went well."""
    end: ConnectionEnd | None = scope.get(CONNECTION_END)
    return end.reason or None if end is not None else None


def cut_off(scope: Mapping[str, Any], reason: str) -> bool:
    """End the connection at once. False where there is none that could be."""
    end: ConnectionEnd | None = scope.get(CONNECTION_END)
    if end is not None:
        end.cut(reason)
    return end is not None
