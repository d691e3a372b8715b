"""A real server on a real socket over the fake engine; whatever a test does, nothing may stay open in the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from openai import OpenAI

from tripool.config import GatewayConfig
from tripool.core import Request, TokenEvent
from tripool.engine.fake import FakeEngine, fake_text
from tripool.engine.thread import EngineThread
from tripool.gateway import create_app
from tripool.gateway.server import Server, listen, url_of
from tripool.text import Tokenizer

DEADLINE_S = 20.0


class WatchedEngine(FakeEngine):
    """The fake engine, with its requests on record and a way to wait for quiet."""

    def __init__(self, *, context_tokens: int) -> None:
        super().__init__(fake_text(), context_tokens=context_tokens)
        self.added: list[Request] = []
        self.fails = threading.Event()
        self._changed = threading.Condition()

    def add(self, request: Request) -> None:
        with self._changed:
            super().add(request)
            self.added.append(request)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            super().cancel(request_id)
            self._changed.notify_all()

    def step(self) -> list[TokenEvent]:
        if self.fails.is_set():
            raise RuntimeError("the device is on fire")
        with self._changed:
            events = super().step()
            self._changed.notify_all()
        return events

    def wait_busy(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.open_requests, DEADLINE_S)

    def wait_idle(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.open_requests, DEADLINE_S)


@dataclass(frozen=True)
class Served:
    engine: WatchedEngine
    thread: EngineThread
    http: httpx.Client
    openai: OpenAI
    address: tuple[str, int]


Serve = Callable[..., AbstractContextManager[Served]]


@contextmanager
def running_server(*, max_body_bytes: int = 2**20, context_tokens: int = 2048) -> Iterator[Served]:
    engine = WatchedEngine(context_tokens=context_tokens)
    config = GatewayConfig(max_body_bytes=max_body_bytes)
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    engine_thread = EngineThread(engine)
    ready = threading.Event()
    app = create_app(engine_thread, Tokenizer(engine.text), engine.name, config)
    server = Server(app, on_ready=ready.set, end_answers=lambda: engine_thread.close(0))
    server_thread = threading.Thread(target=server.run, args=([listener],))
    server_thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        with (
            httpx.Client(base_url=url, timeout=DEADLINE_S) as http,
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as openai,
        ):
            yield Served(engine, engine_thread, http, openai, listener.getsockname())
    finally:
        server.should_exit = True
        server_thread.join(DEADLINE_S)
        engine_thread.close(DEADLINE_S)
        listener.close()


@pytest.fixture
def serve() -> Serve:
    return running_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with running_server() as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    shared_server.engine.added.clear()
    yield shared_server
    assert shared_server.engine.wait_idle(), "requests stayed open in the engine"
    assert shared_server.thread.alive


@pytest.fixture
def check_refusal() -> Callable[..., None]:
    """OpenAI's shape of an error, and the parameter it is about."""

    def check(response: httpx.Response, param: str | None, status: int = 400) -> None:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert error["param"] == param

    return check
