"""A real server on a real socket, and fake engines that can be watched, held up and scripted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from anthropic import Anthropic
from openai import OpenAI

from tripool.config import AdmissionConfig, GatewayConfig
from tripool.core import Request, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.server import listen
from tripool.serving.colocated import ColocatedServer, engine_server
from tripool.tenants import Tenant
from tripool.text import Tokenizer
from tripool.text.files import TextFiles

DEADLINE_S = 60.0
"""Of waits for what must happen: only a failure takes so long."""

FRESH = httpx.Limits(max_keepalive_connections=0)
"""A connection that lies idle for five seconds is closed by the server, perhaps just as it is used again."""


class WatchedEngine(PagedFake):
    """The fake engine, with its requests on record and a way to wait for quiet."""

    def __init__(self, *, context_tokens: int = 2048, text: TextFiles | None = None, **sizes: int) -> None:
        super().__init__(text or fake_text(), context_tokens=context_tokens, **sizes)
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


class ScriptedEngine(WatchedEngine):
    """Answers every request with the same text, then ends."""

    def __init__(self, script: str, *, text: TextFiles | None = None, context_tokens: int = 2048) -> None:
        super().__init__(text=text, context_tokens=context_tokens)
        self._script = [*Tokenizer(self.text).encode(script), min(self.text.end_ids)]

    def step(self) -> list[TokenEvent]:
        return [self._scripted(event) for event in super().step()]

    def add(self, request: Request) -> None:
        super().add(replace(request, params=replace(request.params, ignore_eos=True)))

    def _scripted(self, event: TokenEvent) -> TokenEvent:
        token_id = self._script[event.index]
        last = event.index + 1 == len(self._script)
        if last:
            self.cancel(event.request_id)
        return replace(event, token_id=token_id, finish_reason="stop" if last else event.finish_reason)


class GatedEngine(WatchedEngine):
    """After its first steps it waits for its gate to open."""

    def __init__(self, free_steps: int = 0) -> None:
        super().__init__(context_tokens=10**9)
        self.in_flight = threading.Event()
        self._free_steps = free_steps

    def step(self) -> list[TokenEvent]:
        self._free_steps -= 1
        assert self._free_steps >= 0 or self.in_flight.wait(DEADLINE_S)
        return super().step()


@dataclass(frozen=True)
class Served:
    engine: WatchedEngine
    server: ColocatedServer
    http: httpx.Client
    openai: OpenAI
    anthropic: Anthropic
    address: tuple[str, int]

    def wait_empty(self) -> None:
        """An answer's last byte may reach its client a moment before the server has left it behind."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.http.get("/load").json()["server_load"] and time.monotonic() < deadline_s:
            pass
        assert self.http.get("/load").json()["server_load"] == 0, "requests stayed open in the gateway"


Serve = Callable[..., AbstractContextManager[Served]]


@contextmanager
def running_server(
    *,
    max_body_bytes: int = 2**20,
    context_tokens: int = 2048,
    engine: WatchedEngine | None = None,
    clock: Callable[[], float] = time.monotonic,
    admission: AdmissionConfig | None = None,
    tenants: Callable[[str], Tenant] | None = None,
    limits: ConnectionLimits | None = None,
    **gateway: Any,
) -> Iterator[Served]:
    """`gateway`: further fields of its `GatewayConfig`."""
    engine = engine or WatchedEngine(context_tokens=context_tokens)
    config = GatewayConfig(max_body_bytes=max_body_bytes, **gateway)
    sdk: Any = {
        "api_key": "none",
        "max_retries": 0,
        "timeout": DEADLINE_S,
        "default_headers": {"Connection": "close"},
    }
    with (
        listen("127.0.0.1", 0) as listener,
        engine_server(
            engine, listener, config, admission=admission, tenant_of=tenants, clock=clock, limits=limits
        ) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=DEADLINE_S, limits=FRESH) as http,
        OpenAI(base_url=f"{server.url}/v1", **sdk) as openai,
        Anthropic(base_url=server.url, **sdk) as anthropic,
    ):
        yield Served(engine, server, http, openai, anthropic, listener.getsockname())
