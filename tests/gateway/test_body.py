"""Bytes that are no JSON, of the wrong kind, or too many."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from starlette.requests import Request as HttpRequest

from tripool.errors import Overloaded
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import BodyTooSlow, read_body
from tripool.gateway.grpc.routes import IS_CALL
from tripool.tenants import ANONYMOUS, Caller

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


def request(tenant: str, content: bytes, end: asyncio.Event, **scope: object) -> HttpRequest:
    async def receive():
        nonlocal content
        if content:
            part, content = content, b""
            return {"type": "http.request", "body": part, "more_body": True}
        await end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    caller = Caller(tenant=replace(ANONYMOUS, name=tenant))
    headers = [(b"content-type", b"application/json")]
    return HttpRequest({"type": "http", "headers": headers, "tripool.caller": caller, **scope}, receive)


def test_messages_of_grpc_wait_for_the_memory_that_they_may_need():
    """Their size is not known before they are there: two of a tenant may arrive at once here, however short."""
    bodies = Bodies(2**19, max_held_bytes=4 * 2**20)
    call = {IS_CALL: True}

    async def fill() -> None:
        ends = [asyncio.Event() for _ in range(3)]
        reads = [asyncio.create_task(bodies.read(request("a", b"x", end, **call))) for end in ends]
        ends[2].set()  # this one is complete, and has to wait for the others
        other = await bodies.read(request("b", b"y", ends[2], **call))
        for _ in range(10):
            await asyncio.sleep(0)
        assert other == b"y" and not reads[2].done()
        with pytest.raises(Overloaded):
            await bodies.read(request("a", b"a" * (2**17), ends[2]))  # over HTTP, and too large for what is left
        ends[0].set()
        assert await reads[2] == b"x" and not reads[1].done()
        ends[1].set()
        assert await reads[1] == b"x"

    asyncio.run(fill())


def test_large_bodies_that_arrive_at_once_are_bounded_for_each_tenant_and_together():
    """Slow senders of large bodies would otherwise hold gigabytes; short bodies are never refused."""
    bodies, large, short = Bodies(2**20, max_held_bytes=4 * 2**20), b"a" * (2**19 + 2**16), b"a" * 2**16

    async def fill() -> None:
        end = asyncio.Event()
        ended = asyncio.Event()
        ended.set()
        held = []
        for tenant in "abcd":
            held += [asyncio.create_task(bodies.read(request(tenant, large, end))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await bodies.read(request(tenant, large, ended))
        with pytest.raises(Overloaded):
            await bodies.read(request("e", large, ended))
        assert await bodies.read(request("a", short, ended)) == short
        end.set()
        assert await asyncio.gather(*held) == [large] * 8
        assert await bodies.read(request("a", large, ended)) == large

    asyncio.run(fill())
