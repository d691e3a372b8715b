"""A real server with a key store on a real socket, over the fake engine that has an engine's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tripool.config import GatewayConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine_protocol import StepEngine
from tripool.gateway.auth import Access
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.server import listen
from tripool.serving.colocated import engine_server
from tripool.tenants.key_store import KeyStore
from tripool.tenants.key_watcher import KeyWatcher
from tripool.tenants.usage_log import UsageLog

DEADLINE_S = 60.0
NOW_S = 1_800_000_000.0


class Clock:
    """A clock that moves on demand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Guarded:
    engine: StepEngine
    usage_log: UsageLog
    access: Access
    url: str
    http: httpx.Client

    def wait_empty(self, key: str) -> None:
        """Until the gateway has left every answer behind. `key`: an admin's."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.http.get("/load", headers=bearer(key)).raise_for_status().json()["server_load"]:
            assert time.monotonic() < deadline_s, "requests stayed open in the gateway"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def make_keys(path: Path, *names: str, settings: dict[str, Any] | None = None) -> dict[str, str]:
    """One key per name; `admin` is an admin."""
    with KeyStore(path, create=True) as key_store:
        return {
            name: key_store.add_key(name, now_s=time.time(), settings=settings or {}, admin=name == "admin")
            for name in names
        }


def paged(**options: Any) -> PagedFake:
    return PagedFake(fake_text(), **{"num_blocks": 4096, "max_running": 16, "step_tokens": 2048} | options)


@contextmanager
def guarded_server(
    path: Path,
    *,
    engine: StepEngine | None = None,
    watch_clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    limits: ConnectionLimits | None = None,
    **gateway: Any,
) -> Iterator[Guarded]:
    """`gateway`: fields of its `GatewayConfig`."""
    engine = engine or paged()
    usage_log = UsageLog(path, clock=wall_clock)
    access = Access(KeyWatcher(path, may_be_open=True, clock=watch_clock), usage_log, clock=wall_clock)
    # An idle connection may be closed by the server just as it is used again.
    fresh = httpx.Limits(max_keepalive_connections=0)
    with (
        listen("127.0.0.1", 0) as listener,
        closing(access),
        engine_server(engine, listener, GatewayConfig(**gateway), access=access, limits=limits) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=DEADLINE_S, limits=fresh) as http,
    ):
        yield Guarded(engine, usage_log, access, server.url, http)
