"""Logs one line per HTTP request, however it ends: caller, route, outcome, times.

| source | stored in the request's scope |
|---|---|
| this middleware | the request's id, until the body names another, and our own id of it |
| code that refuses | the error's code: its message may quote what was sent |
| the guard | the caller, of which the tenant's name is logged |
| a generation endpoint | the record |

`shown_id` says what is shown of ids that clients choose. Of paths, the words that a route has are shown; the rest
is a star, and queries are not shown.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tripool.errors import TripoolError
from tripool.gateway.grpc import GENERATE, REFLECT
from tripool.gateway.parse import header_id
from tripool.gateway.record import Record
from tripool.gateway.refusals import dialect_of, error_headers, error_shape
from tripool.tenants import OPEN_CALLER, Caller

# A client may put anything into `X-Request-Id`, also by mistake: its key, or words of a prompt. So the log shows the
# client's id only where it can be nothing but an id, else a keyed hash.
#
# | the client's id | in the log |
# |---|---|
# | up to 32 letters, digits, `_`, `-`; a UUID, trace id or digest, with a word before it (`req_4f...`) | as it is |
# | anything else, and what holds something like the beginning of a key | `~` and a hash, the same for the same id |
#
# The hash key is random for each process, so a reader of the log cannot try words on it. `explain` maps a client's id
# to the server's own id, which every line has.
_SHORT = re.compile(r"[0-9A-Za-z_-]{1,32}")
"""A key has 43 such characters after its prefix."""
_DIGITS = re.compile(r"(?:[A-Za-z]{1,16}[_-])?[0-9A-Fa-f-]{1,64}")
_LIKE_A_KEY = re.compile(r"(?<!ht)tp-[0-9A-Za-z_-]{8}", re.IGNORECASE)


def shown_id(request_id: str, secret: bytes) -> str:
    shaped = _SHORT.fullmatch(request_id) or _DIGITS.fullmatch(request_id)
    if shaped and not _LIKE_A_KEY.search(request_id):
        return request_id
    return "~" + blake2b(request_id.encode(), key=secret, digest_size=6, person=b"tripool-log").hexdigest()


LOG = logging.getLogger("tripool.gateway")
_UNAUTHENTICATED_LOG = logging.getLogger("tripool.unauthenticated")
"""For requests of unauthenticated callers: the log limits their rate."""
CALLER = "tripool.caller"
_ID, _KEY, _ERROR = "tripool.request_id", "tripool.key", "tripool.error"
_RECORD, _MODEL, _UNAUTHENTICATED = "tripool.record", "tripool.model", "tripool.unauthenticated"
_HUNG_UP = 499
"""As in nginx: the client disconnected before it had a status."""
_WORDS = frozenset(
    {
        "", "v1", "chat", "completions", "messages", "count_tokens", "responses", "cancel", "input_items", "api",
        "generate", "tags", "ps", "show", "files", "content", "batches",
        "input_tokens", "tokenize", "detokenize", "tokenizer_info", "models", "load",
        "unload", "requests", "explain", "health", "ready", "ping", "version", "metrics", "drain", "pools", "cache",
        "canary", "docs", "oauth2-redirect", "redoc", "openapi.json", *GENERATE.split("/"), *REFLECT.split("/"),
    }
)  # fmt: skip
"""Words of all routes; anything else in a path is the client's own."""
_MAX_WORDS = 8
_QUIET = frozenset({"/health", "/ping", "/health/ready", "/load", "/metrics", "/version"})
"""Polled every few seconds by machines."""
_IN_THE_LOG = "this is in the log already"


def note_error(scope: Scope, code: str | None, *, unauthenticated: bool = False) -> None:
    """The code of the error that refuses the request. `unauthenticated`: before the caller was authenticated."""
    scope[_ERROR], scope[_UNAUTHENTICATED] = code, unauthenticated


async def refuse(
    scope: Scope, receive: Receive, send: Send, error: TripoolError, on_refused: Callable[[str], object],
    *, headers: Mapping[str, str] | None = None, unauthenticated: bool = False,
) -> None:  # fmt: skip
    """The answer of a middleware that refuses the request, in its caller's dialect. `on_refused` gets the code."""
    on_refused(error.code)
    note_error(scope, error.code, unauthenticated=unauthenticated)
    body = error_shape(error, dialect_of(scope["path"]))
    response = JSONResponse(body, status_code=error.status, headers=error_headers(error) | dict(headers or {}))
    await response(scope, receive, send)


def note_record(scope: Scope, record: Record, model: str) -> None:
    scope[_RECORD], scope[_MODEL] = record, model


def log_connection(code: str) -> None:
    """A connection refused or cut below the application. A logger of its own: clients can cause this at will."""
    logging.getLogger("tripool.connections").info("connection ended", extra={"error": code})


def request_id_of(scope: Scope) -> str | None:
    """The client's id of the request, or ours; None where nothing is logged."""
    found: str | None = scope.get(_ID)
    return found


def is_wanted(record: logging.LogRecord) -> bool:
    """A filter for uvicorn's log: drops exceptions that a request's line already reports, and advice."""
    error = record.exc_info[1] if record.exc_info else None
    advice = str(record.msg).startswith("No supported WebSocket library")  # not used on purpose
    return not advice and _IN_THE_LOG not in getattr(error, "__notes__", ())


class RequestLog:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._secret = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        asked = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        scope[_KEY] = key = secrets.token_hex(12)
        scope[_ID] = request_id = header_id(asked.decode("latin-1")) or key
        status = _HUNG_UP

        def noted(message: Message) -> Any:  # not a coroutine: called for every token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            return send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            error = sys.exception()
            if isinstance(error, Exception):
                status = 500 if status == _HUNG_UP else status  # the outer error handler answers with it
                error.add_note(_IN_THE_LOG)
            took_s = time.perf_counter() - began_s
            _log(scope, status, took_s, error if isinstance(error, Exception) else None, self._secret)


def _log(scope: Scope, status: int, took_s: float, error: Exception | None, secret: bytes) -> None:
    record: Record | None = scope.get(_RECORD)
    route, code = shown_path(scope["path"]), scope.get(_ERROR) or (record and record.error_code)
    level = logging.INFO
    if error is not None:
        level, code = logging.ERROR, TripoolError.code
    elif route in _QUIET:
        level = logging.DEBUG
    elif status >= 500:
        level = logging.WARNING
    log = _UNAUTHENTICATED_LOG if scope.get(_UNAUTHENTICATED) else LOG
    if not log.isEnabledFor(level):
        return
    caller: Caller = scope.get(CALLER, OPEN_CALLER)
    fields: dict[str, Any] = {
        "request_id": shown_id(scope[_ID] if record is None else record.request_id, secret),
        "key": scope[_KEY] if record is None else record.key,
        "tenant": caller.tenant.name or None,
        "method": _method(scope["method"]),
        "route": route,
        "status": status,
        "error": code,
    }
    if record is not None:
        fields |= {"model": scope[_MODEL], **_of(record)}
    fields["total_ms"] = round(took_s * 1e3, 3)
    log.log(level, "request", extra=fields, exc_info=error)


def shown_path(path: str) -> str:
    """Without words chosen by the client."""
    words = path.split("/")
    shown = "/".join([word if word in _WORDS else "*" for word in words[:_MAX_WORDS]])
    return f"{shown}/*" if len(words) > _MAX_WORDS else shown


def _method(method: str) -> str:
    """Unknown methods are a star."""
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "*"


def _of(record: Record) -> dict[str, Any]:
    """Counts and times of a generation request: all stages, also those of 0 ms."""
    fields: dict[str, Any] = {
        "stream": record.stream,
        "ended": record.state,
        "prompts": record.num_prompts,
        "n": record.n,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.used("cached_tokens"),
        "completion_tokens": record.used("completion_tokens"),
        "finish": ",".join(f"{reason}:{number}" for reason, number in sorted(record.finish_reasons.items())) or None,
    }
    stages = {f"{name}_ms": us / 1e3 for name, us in record.stages_us().items()}
    first = {"first_token_ms": record.first_token_us / 1e3} if record.has_tokens else {}
    return fields | stages | first
