"""A real gateway over the fake engine, and a server that says whatever bytes a test wants said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tripool.config import GatewayConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.thread import EngineThread
from tripool.gateway import create_app
from tripool.gateway.server import Server, listen, url_of
from tripool.text import Tokenizer

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Gateway:
    url: str
    engine: PagedFake


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    engine = PagedFake(fake_text(), context_tokens=4096)
    listener = listen("127.0.0.1", 0)
    thread, ready = EngineThread(engine), threading.Event()
    app = create_app(thread, Tokenizer(engine.text), engine.name, GatewayConfig())
    server = Server(app, on_ready=ready.set, end_answers=lambda: thread.close(0))
    serving = threading.Thread(target=server.run, args=([listener],))
    serving.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield Gateway(url_of(listener), engine)
    finally:
        server.should_exit = True
        serving.join(DEADLINE_S)
        thread.close(DEADLINE_S)
        listener.close()


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
