"""Limits of one HTTP connection and of the connections of a tenant, and why a connection was cut off. No uvicorn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tripool.errors import TripoolError
from tripool.gateway.auth import OPEN_PATHS
from tripool.gateway.connection_table import Claim
from tripool.gateway.refusals import TenantConnections, TooManyConnections
from tripool.gateway.request_log import CALLER, refuse
from tripool.tenants import OPEN_CALLER, Caller

_HINT = "close some, or wait until one of your requests has ended"


class ConnectionQuota:
    """Behind the guard, which knows the tenant. `on_refused` is called with the code."""

    def __init__(self, app: ASGIApp, *, on_refused: Callable[[str], object]) -> None:
        self._app, self._on_refused = app, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        claim: Callable[..., tuple[Claim, bool]] | None = scope.get(CLAIM)
        if scope["type"] == "http" and claim is not None and scope["path"] not in OPEN_PATHS:
            caller: Caller = scope.get(CALLER, OPEN_CALLER)
            verdict, whole = claim(caller.tenant.name, shared=caller != OPEN_CALLER)
            if verdict is not Claim.GRANTED:
                await self._refuse(verdict, whole, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refuse(self, verdict: Claim, whole: bool, scope: Scope, receive: Receive, send: Send) -> None:
        error: TripoolError = TooManyConnections("all connections are in use", hint="try again in a moment")
        if verdict is Claim.TENANT_FULL:
            error = TenantConnections(
                "this key's requests already use as many connections as one tenant may", hint=_HINT
            )
        # Closing while the client still sends would lose the answer: the rest is dropped, within bounds.
        headers = {"connection": "close"} if whole else {}
        await refuse(scope, receive, send, error, self._on_refused, headers=headers)


SLOW_READER = "slow_reader"
"""Cancel reason of a request whose client does not read its answer."""
CONNECTION_END = "tripool.connection_end"
CLAIM = "tripool.claim"
"""Keys in the scope of every request; the second holds `Connection.claim`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_open: int = 4096
    head_bytes: int = 2**16
    num_headers: int = 100
    head_s: float = 10.0
    idle_s: float = 20.0
    """Longer than clients keep a connection for their next request (httpx and OpenAI's: 5 s), also where they are late:
    a request on a connection that is being closed is lost, and its client sees a reset."""
    unwanted_bytes: int = 8 * 2**20
    """Read and dropped: closing while the client still sends would lose the answer."""
    leftover_s: float = 5.0
    refused_s: float = 2.0
    frame_bytes: int = 16
    """Framing bytes allowed per body byte of a chunked body, besides `head_bytes`."""
    buffered_bytes: int = 2**16
    """Write buffer of the connection: the application waits when it holds more."""
    taken_bytes: int = 2**14
    take_s: float = 30.0


class ConnectionEnd:
    """Why the server cut a connection, for the code that still answers on it. Empty: it did not.

    `cut` cuts it for a reason of the application.
    """

    def __init__(self, cut: Callable[[str], object] = lambda reason: None) -> None:
        self.reason = ""
        self.cut = cut


def cut_off_because(scope: Mapping[str, Any]) -> str | None:
    """None when the client disconnected by itself, or the connection is intact."""
    end: ConnectionEnd | None = scope.get(CONNECTION_END)
    return end.reason or None if end is not None else None


def cut_off(scope: Mapping[str, Any], reason: str) -> bool:
    """Cut the connection at once. False if it cannot be cut."""
    end: ConnectionEnd | None = scope.get(CONNECTION_END)
    if end is not None:
        end.cut(reason)
    return end is not None
