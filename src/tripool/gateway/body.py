"""Reads a request body within bounds and decodes it as strict JSON. Independent of endpoints."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from tripool.errors import InvalidRequest


class BodyTooLarge(InvalidRequest, status=413, code="request_too_large"):
    """The body is larger than this server accepts."""


class NotJson(InvalidRequest, status=415, code="unsupported_media_type"):
    """Wrong content type. A web page can post other types to a loopback server without a preflight, but not JSON."""


class BodyTooSlow(InvalidRequest, status=408, code="request_timeout"):
    """The body did not arrive in time."""


class BodyCutOff(InvalidRequest, code="request_cut_off"):
    """The client disconnected while sending it; this error is never read."""


MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
_MAX_DIGITS = 20
"""Digits of a 64-bit integer, with its sign."""
MAX_DEPTH = 64
"""Levels of objects and lists in a body; real tool schemas have about ten."""
_WITHIN_S = 60.0
"""Deadline of a whole body: a client that stops in the middle of one must not hold a connection for ever."""


async def read_body(
    http: HttpRequest,
    max_bytes: int,
    *,
    hold: Callable[[int], object] = lambda size: None,
    within_s: float = _WITHIN_S,
) -> bytes:
    """`hold` is called with the size so far, and may refuse more."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson(f"the content type is '{kind}'", hint="send 'Content-Type: application/json'")
    declared = http.headers.get("content-length", "").lstrip("0")
    if declared.isdecimal() and (len(declared) > _MAX_DIGITS or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for part in http.stream():
                size += len(part)
                if size > max_bytes:  # a chunked body declares no length
                    raise _too_large(max_bytes)
                hold(size)
                parts.append(part)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body was not complete after {within_s:g} s", hint="send it faster, or less") from error
    except ClientDisconnect as error:
        raise BodyCutOff("the body is incomplete") from error
    return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes", hint="send less in one request")


def body_docs(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON body of this schema, for the OpenAPI page: FastAPI does not read bodies here, so cannot describe them."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def decode_json(raw: bytes) -> dict[str, Any]:
    """A body. `json.loads` on bytes would accept lone surrogates and guess at UTF-16."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return decode_object(text, "the body")


def decode_object(text: str, what: str, *, param: str | None = None) -> dict[str, Any]:
    """A JSON object that a client sent as text; `what` names it in errors."""
    value = decode_text(text, what, param=param)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is a JSON {type(value).__name__}", hint="send an object", param=param)
    return value


def decode_text(text: str, what: str, *, param: str | None = None) -> Any:
    """Any JSON value.

    Refuses NaN, Infinity, numbers that overflow to it, lone surrogates, and deep nesting: later code may walk, print
    and copy by recursion.
    """
    try:
        value = _DECODER.decode(text)
        _check_depth(text, value)
        if "\\ud" in text or "\\uD" in text:  # only an escape can encode a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, lone surrogates, too many digits
        raise InvalidRequest(f"{what} is not valid JSON: {error}", param=param) from error
    return value


def _check_depth(text: str, value: object) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:  # the usual case, also for long lists of token ids
        return
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int | float:
    """64 bits, signed or unsigned; a larger integer becomes a float."""
    if len(digits) < _MAX_DIGITS - 1:  # fast path: token ids come by the hundred thousand
        return int(digits)
    if len(digits) <= _MAX_DIGITS and MIN_INTEGER <= (value := int(digits)) <= MAX_INTEGER:
        return value
    return _finite(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:_MAX_DIGITS]} is too large for a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer, parse_float=_finite)
