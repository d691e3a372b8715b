"""Connections to one gateway of several that share a port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from . import faults
from .serving import DEADLINE_S, SplitServer


@contextmanager
def pinned(server: SplitServer, **options: object) -> Iterator[list[httpx.Client]]:
    """A client for each gateway, which keeps its connection to it. Others are stopped while it is accepted; `options`:
    of the clients."""
    pids = server.all("gateway")
    with ExitStack() as stack:
        clients = []
        for pid in pids:
            limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=DEADLINE_S)
            client = httpx.Client(base_url=server.url, timeout=DEADLINE_S, limits=limits, **options)  # type: ignore[arg-type]
            clients.append(stack.enter_context(client))
            others = [other for other in pids if other != pid]
            for other in others:
                faults.stop(other)
            try:
                client.get("/version").raise_for_status()
            finally:
                for other in others:
                    faults.wake(other)
        yield clients
