"""A real gateway over the fake engine, and a server that says whatever bytes a test wants said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.server import listen
from tripool.serving.colocated import engine_server

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Gateway:
    url: str
    engine: PagedFake


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    engine = PagedFake(fake_text(), context_tokens=4096)
    with listen("127.0.0.1", 0) as listener, engine_server(engine, listener) as server, server.running():
        yield Gateway(server.url, engine)


Says = Callable[[bytes, asyncio.StreamWriter, int], Coroutine[Any, Any, None]]
"""What to do about a request with this body; the number counts requests over all connections."""


@asynccontextmanager
async def speaking(says: Says, heads: Callable[[bytes], object] = len) -> AsyncIterator[str]:
    """The URL of a server that answers every request by calling `says`; `heads` sees what came before each body."""
    count = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads(head)
                length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"Content-Len")), 0)
                body = await reader.readexactly(length)
                count += 1
                await says(body, writer, count)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    talking: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.add(asyncio.ensure_future(talk(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            for task in talking:
                task.cancel()
            if talking:
                await asyncio.wait(talking)


def whole_answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body
