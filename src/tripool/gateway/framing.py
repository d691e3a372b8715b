"""Request framing: refuses a request whose end two HTTP implementations could read differently (request smuggling).

So a body has a Content-Length of few digits, or comes in chunks over HTTP/1.1 and in no other transfer coding; the
parser refuses both at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tripool.gateway.refusals import NotHttp

Headers = Sequence[tuple[bytes, bytes]]

_MAX_DIGITS = 20
"""Of a length. Leading zeros are legal, but no client sends them."""


def check_framing(headers: Headers, http_version: str) -> None:
    """Raises NotHttp."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or http_version != "1.1"):
        hint = "send 'Transfer-Encoding: chunked' and HTTP/1.1, or a Content-Length"
        raise NotHttp("the body is in a transfer coding that is not served", hint=hint)
    if any(len(value) > _MAX_DIGITS for name, value in headers if name == b"content-length"):
        raise NotHttp(f"the Content-Length has more than {_MAX_DIGITS} digits", hint="send no leading zeros")


def body_head(headers: Headers) -> bytes | None:
    """The smallest head before such a body; None without a body."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t")):
            return b"POST / HTTP/1.1\r\n" + name + b": " + value + b"\r\n\r\n"
    return None
