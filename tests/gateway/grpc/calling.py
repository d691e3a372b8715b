"""A server that speaks gRPC on a real socket, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx

from gateway.serving import DEADLINE_S, FRESH, WatchedEngine
from tripool.config import GatewayConfig
from tripool.gateway.auth import Access
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.grpc import GENERATE
from tripool.gateway.grpc.messages import GenerateReply, GenerateRequest
from tripool.gateway.grpc.port import reserved
from tripool.gateway.server import listen
from tripool.serving.colocated import engine_server


@dataclass(frozen=True)
class Called:
    engine: WatchedEngine
    http: httpx.Client
    address: str
    channel: grpc.Channel

    def call(self, *, timeout: float = DEADLINE_S, metadata: Any = (), **request: Any) -> Any:
        """The open call; its iteration gives replies."""
        return self.send(GenerateRequest(**request).SerializeToString(), timeout=timeout, metadata=metadata)

    def send(self, raw: bytes, *, timeout: float = DEADLINE_S, metadata: Any = ()) -> Any:
        generate = self.channel.unary_stream(GENERATE, None, GenerateReply.FromString)
        return generate(raw, timeout=timeout, metadata=metadata)

    def ask(self, **request: Any) -> list[Any]:
        return list(self.call(**request))


def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Status, message and trailing metadata of a call that must fail."""
    try:
        replies = list(call)
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details(), dict(failed.trailing_metadata())
    raise AssertionError(f"answered with {replies}")


@contextmanager
def calling(
    engine: WatchedEngine | None = None,
    *,
    access: Access | None = None,
    limits: ConnectionLimits | None = None,
    **gateway: Any,
) -> Iterator[Called]:
    """`gateway`: fields of its `GatewayConfig`."""
    engine = engine or WatchedEngine()
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        address = stack.enter_context(reserved("127.0.0.1", 0))
        assert address is not None
        config = GatewayConfig(**gateway)
        server = engine_server(engine, listener, config, access=access, limits=limits, grpc_address=address)
        stack.enter_context(stack.enter_context(server).running())
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=DEADLINE_S, limits=FRESH))
        yield Called(engine, http, address, stack.enter_context(grpc.insecure_channel(address)))
        assert engine.fails.is_set() or engine.wait_idle(), "requests stayed open in the engine"
