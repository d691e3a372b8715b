"""Bytes that are no JSON, of the wrong kind, or too many."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request as HttpRequest

from tripool.gateway.body import BodyTooSlow, read_body

HELLO = [{"role": "user", "content": "hello"}]

BAD_BYTES = [
    b"",
    b"{",
    b"null",
    b'{"messages": NaN}',
    b"\xff\xfe{}",
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    b"[" * 100_000,
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}]} trailing',
]


@pytest.mark.parametrize("raw", BAD_BYTES, ids=lambda raw: repr(raw[:30]))
def test_bad_bytes(server, check_refusal, raw):
    headers = {"content-type": "application/json"}
    check_refusal(server.http.post("/v1/chat/completions", content=raw, headers=headers), None)


def test_another_content_type(server, check_refusal):
    response = server.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    check_refusal(response, None, status=415)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(serve, check_refusal, chunked):
    with serve(max_body_bytes=1000) as served:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        headers = {"content-type": "application/json"}
        content = iter([body[:500], body[500:]]) if chunked else body
        check_refusal(served.http.post("/v1/chat/completions", content=content, headers=headers), None, status=413)
        fits = served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1})
        assert fits.status_code == 200


def test_half_a_body_is_waited_for_only_so_long():
    """A client that stalls must not be inside for ever: a server that drains would never be empty."""
    parts = iter([{"type": "http.request", "body": b'{"messages"', "more_body": True}])

    async def receive():
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}

    async def read() -> bytes:
        return await read_body(HttpRequest(scope, receive), 1000, within_s=0.01)

    with pytest.raises(BodyTooSlow) as refused:
        asyncio.run(read())
    assert refused.value.status == 408
