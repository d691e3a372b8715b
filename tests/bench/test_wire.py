"""The HTTP client: keeps connections, and gives every failure a name within a deadline."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench.wire import Address, ExchangeFailed, HttpClient
from tripool.errors import InvalidRequest

from .conftest import DEADLINE_S, speaking, whole_answer


async def get(client: HttpClient, timeout_s: float = DEADLINE_S) -> tuple[int, bytes]:
    parts: list[bytes] = []
    status = await client.exchange("GET", "/x", b"", lambda _, data, __: parts.append(data), timeout_s=timeout_s)
    return status, b"".join(parts)


async def failing(says) -> ExchangeFailed:
    async with speaking(says) as url:
        client = HttpClient(Address.parse(url))
        with pytest.raises(ExchangeFailed) as failed:
            await get(client)
        client.close()
    return failed.value


def test_addresses():
    assert Address.parse("http://127.0.0.1:8000/v1/") == Address("127.0.0.1", 8000, False, "")
    assert Address.parse("localhost:80") == Address("localhost", 80, False, "")
    assert Address.parse("https://here/some/where/v1") == Address("here", 443, True, "/some/where")
    assert str(Address.parse("http://[::1]:9/v1")) == "http://[::1]:9"


@pytest.mark.parametrize("url", ["", "http://", "ftp://here", "http://here:port", "http://he re", "http://here:70000"])
def test_what_is_no_address(url):
    with pytest.raises(InvalidRequest) as refused:
        Address.parse(url)
    assert refused.value.param == "url"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = Address.parse(text)
    except InvalidRequest:
        return
    assert address.host and 0 <= address.port < 2**16


def test_a_key_is_sent_and_cannot_write_headers():
    heads = []

    async def main():
        async def says(body, writer, count):
            writer.write(whole_answer(b""))

        async with speaking(says, heads.append) as url:
            client = HttpClient(Address.parse(url), api_key="sk-1")
            await get(client)
            client.close()

    asyncio.run(main())
    assert b"\r\nAuthorization: Bearer sk-1\r\n" in heads[0]
    with pytest.raises(InvalidRequest):
        HttpClient(Address("here", 80, False, ""), api_key="a\r\nX-Evil: 1")


def test_connections_are_kept():
    ports = set()

    async def says(body, writer, count):
        ports.add(writer.get_extra_info("peername"))
        writer.write(whole_answer(b"%d" % count))

    async def main():
        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            answers = [await get(client) for _ in range(3)]
            client.close()
        return answers

    assert asyncio.run(main()) == [(200, b"1"), (200, b"2"), (200, b"3")]
    assert len(ports) == 1


def test_exchanges_at_once_have_connections_of_their_own():
    async def main():
        everybody = asyncio.Barrier(8)

        async def says(body, writer, count):
            await everybody.wait()  # nobody is answered before all are there
            writer.write(whole_answer(b"x"))

        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            answers = await asyncio.gather(*(get(client) for _ in range(8)))
            client.close()
        return answers

    assert asyncio.run(main()) == [(200, b"x")] * 8


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced():
    async def says(body, writer, count):
        if count == 2:  # the first request on the kept connection: closed as by a server's idle limit
            writer.close()
            return
        writer.write(whole_answer(b"%d" % count))

    async def main():
        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            answers = [await get(client), await get(client)]
            client.close()
        return answers

    assert asyncio.run(main()) == [(200, b"1"), (200, b"3")]


def test_connection_close_is_obeyed():
    async def says(body, writer, count):
        writer.write(whole_answer(b"%d" % count, more="Connection: close\r\n"))
        await writer.drain()
        writer.close()

    async def main():
        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            answers = [await get(client), await get(client)]
            client.close()
        return answers

    assert asyncio.run(main()) == [(200, b"1"), (200, b"2")]


def test_cut_off():
    async def says(body, writer, count):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    assert asyncio.run(failing(says)).kind == "cut off"


def test_garbled():
    async def says(body, writer, count):
        writer.write(b"220 smtp.here ready\r\n")

    assert asyncio.run(failing(says)).kind == "garbled"


def test_a_server_that_says_nothing():
    async def main():
        async def says(body, writer, count):
            await asyncio.Event().wait()

        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            with pytest.raises(ExchangeFailed) as failed:
                await get(client, timeout_s=0.05)
            client.close()
        return failed.value

    assert asyncio.run(main()).kind == "timeout"


def test_no_server():
    with socket.socket() as bound:  # bound and not listening: nobody else can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        client = HttpClient(Address("127.0.0.1", bound.getsockname()[1], False, ""))
        with pytest.raises(ExchangeFailed) as failed:
            asyncio.run(get(client))
    assert failed.value.kind == "refused"
