"""CORS: lets web pages of named origins use the server from a browser. Off unless the operator names some.

| | a named origin | `*` |
|---|---|---|
| may read answers of a server with keys, which its page must send | yes | every page |
| may use a server without keys | yes | no: such a page may be any site's, and every caller is the operator |

A preflight is answered here, before authentication: browsers send no key with it, and it does nothing. The request
after it passes all other checks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tripool.errors import InvalidRequest
from tripool.gateway.auth import needed_no_key

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")
_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\s*,\s*[A-Za-z0-9_-]{1,64}){0,63}")
_MAX_AGE_S = 600
_EXPOSED = "x-request-id, retry-after"
ANY = "*"


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Raises InvalidRequest for what no browser sends as an origin."""
    found = []
    for origin in origins:
        name = origin.strip().lower().rstrip("/")
        if name != ANY and not _ORIGIN.fullmatch(name):
            hint = "like https://app.example.org or http://localhost:3000; * is every origin, on a server with keys"
            raise InvalidRequest(f"'{origin[:100]}' is not the origin of a web page", hint=hint, param="cors_origin")
        found.append(name)
    return tuple(found)


class Cors:
    """Outside of the guard, so that pages can read refusals too. `guarded`: whether there is a guard."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str], guarded: bool) -> None:
        self._app, self._origins, self._guarded = app, frozenset(origins), guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        origin = None if headers is None else headers.get("origin")
        if headers is None or origin is None or not self._is_known(origin):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await send({"type": "http.response.start", "status": 204, "headers": _preflight(headers, origin)})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, self._marking(scope, send, origin))

    def _is_known(self, origin: str) -> bool:
        return origin.lower() in self._origins or ANY in self._origins

    def _marking(self, scope: Scope, send: Send, origin: str) -> Send:
        """`send` that lets the page read the answer."""
        named = origin.lower() in self._origins

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start" and (named or not needed_no_key(scope, guarded=self._guarded)):
                more = [*_allowed(origin), (b"access-control-expose-headers", _EXPOSED.encode())]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        return marked


def _allowed(origin: str) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


def _preflight(headers: Headers, origin: str) -> list[tuple[bytes, bytes]]:
    answer = [*_allowed(origin), (b"access-control-allow-methods", b"GET, POST, DELETE")]
    wanted = headers.get("access-control-request-headers", "")
    if _NAMES.fullmatch(wanted):
        answer.append((b"access-control-allow-headers", wanted.encode()))
    if headers.get("access-control-request-private-network") == "true":
        answer.append((b"access-control-allow-private-network", b"true"))
    return [*answer, (b"access-control-max-age", str(_MAX_AGE_S).encode())]
