"""Error responses in the formats of all APIs, and the errors that only the gateway raises."""

from __future__ import annotations

import math
from typing import Any, Literal

from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.grpc import GENERATE, REFLECT

Dialect = Literal["openai", "anthropic", "ollama", "grpc"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class Draining(TripoolError, status=503, code="draining", retry_after_s=5):
    """The server accepts no new requests."""


class NotReady(TripoolError, status=503, code="not_ready", retry_after_s=5):
    """The response of `/health/ready` when the server should not receive requests."""


class RequestUnknown(TripoolError, status=404, code="request_unknown"):
    """No remembered request has this id."""


class NotHttp(TripoolError, status=400, code="not_http"):
    """Not an HTTP/1 request: TLS or HTTP/2 on the plain port, or garbage."""


class HeadTooLarge(TripoolError, status=431, code="head_too_large"):
    """The request line and headers, or the framing of a chunked body, are too large."""


class HeadTooSlow(TripoolError, status=408, code="head_too_slow"):
    """The request line and headers did not arrive in time."""


class TooManyConnections(TripoolError, status=503, code="too_many_connections", retry_after_s=1):
    """All connections are in use."""


class TenantConnections(TripoolError, status=429, code="tenant_connections", retry_after_s=1):
    """One tenant uses its share of the connections."""


class HostRefused(TripoolError, status=403, code="host_refused"):
    """A host name that another web site may have given this server (DNS rebinding)."""


class OtherSite(TripoolError, status=403, code="other_site"):
    """A page of another web site may not control a server that runs on its visitor's machine."""


class ThreadUnsupported(InvalidRequest, code="thread_unsupported_request"):
    """A client of Messages continues a conversation that the server would have to hold."""


def dialect_of(path: str) -> Dialect:
    if path.startswith("/api/"):
        return "ollama"
    if path in (GENERATE, REFLECT):
        return "grpc"
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def error_shape(error: TripoolError, dialect: Dialect = "openai") -> dict[str, Any]:
    param = error.param if isinstance(error, InvalidRequest) else None
    body = error_body(error.status, str(error), code=error.code, param=param, dialect=dialect)
    return body | {"hint": error.hint} if dialect == "grpc" else body


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None, dialect: Dialect = "openai"
) -> dict[str, Any]:
    if dialect == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        # Its clients tell kinds of the same status apart by `details`.
        return {
            "type": "error",
            "error": {
                "type": kind, "message": message, "param": param, "code": code, "details": {"error_code": code},
            },
        }  # fmt: skip
    if dialect == "ollama":
        return {"error": message, "code": code, "param": param}
    if dialect == "grpc":
        return {"status": status, "message": message, "code": code, "param": param}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: TripoolError) -> dict[str, str]:
    """`Retry-After`, where a retry makes sense."""
    seconds = error.retry_after_s
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}
