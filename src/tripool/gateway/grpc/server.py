"""The gRPC server beside the HTTP one, on its event loop: generation, health and reflection.

| service | who |
|---|---|
| `grpc.health.v1.Health` `Check` | everyone, as `/health/ready` |
| `tripool.v1.Generation`, reflection | every key, where keys are asked for |

`Watch` of the health service is not there: without a key, streams could be held open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from starlette.types import ASGIApp

from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.connection_table import Claim, ConnectionTable
from tripool.gateway.grpc import GENERATE, REFLECT
from tripool.gateway.grpc.call import Call
from tripool.gateway.grpc.messages import PACKAGE
from tripool.gateway.server import CannotListen

_SERVICE = f"{PACKAGE}.Generation"
_HEALTH = "grpc.health.v1.Health"
_NAMES = (_SERVICE, _HEALTH, reflection.SERVICE_NAME)
_MAX_CALLS = 512
_MAX_CONNECTIONS = 256
_CALLS_OF_ONE = 128
"""Open calls on one connection."""
_HANDSHAKE_MS, _IDLE_MS, _KEEPALIVE_MS = 10_000, 60_000, 60_000
_LARGER_BYTES = 2**16
"""A message that is too large by less is refused by the application, which says how large it may be."""
_LOOKAHEAD_BYTES = 2**16
_REFLECT_S = 30.0


class GrpcServer:
    """For one event loop, which `start` runs on. `max_bytes`: of a message."""

    def __init__(self, app: ASGIApp, address: str, *, max_bytes: int, limits: ConnectionLimits) -> None:
        self._app, self._address, self._max_bytes, self._limits = app, address, max_bytes, limits
        self._calls: ConnectionTable[int] = ConnectionTable(_MAX_CALLS)
        self._num_calls = 0
        self._server: Any = None

    async def start(self) -> None:
        options = (
            ("grpc.max_receive_message_length", self._max_bytes + _LARGER_BYTES),
            # What a call may send before its message is read (see `Bodies`).
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_concurrent_streams", _CALLS_OF_ONE),
            ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.so_reuseport", 1),  # the address is reserved, see `port.py`
        )
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        server.add_generic_rpc_handlers(self._handlers())
        try:
            server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {self._address}", hint="choose another --grpc-port") from error
        await server.start()
        self._server = server

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once; open ones have `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _handlers(self) -> tuple[Any, ...]:
        # As streams, so that a handler runs before the message is read; on the wire it is the same.
        generate = grpc.stream_stream_rpc_method_handler(self._generate)
        check = grpc.unary_unary_rpc_method_handler(
            self._check, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        )
        reflect = grpc.stream_stream_rpc_method_handler(
            self._reflect,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return (
            grpc.method_handlers_generic_handler(_SERVICE, {GENERATE.rpartition("/")[2]: generate}),
            grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {REFLECT.rpartition("/")[2]: reflect}),
        )

    @asynccontextmanager
    async def _called(self, context: Any) -> AsyncIterator[Call]:
        """A call, with its place in the shares of tenants."""
        self._num_calls += 1
        number = self._num_calls
        self._calls.waits(number, known=True)
        try:
            yield Call(context, take_s=self._limits.take_s, claim=partial(self._claim, number))
        finally:
            self._calls.closed(number)

    def _claim(self, number: int, tenant: str, *, shared: bool) -> tuple[Claim, bool]:
        return self._calls.claim(number, tenant, shared=shared), False

    async def _generate(self, _: object, context: Any) -> None:
        async with self._called(context) as call:
            await call.run(self._app, GENERATE)
        await call.end()

    async def _check(self, asked: Any, context: Any) -> Any:
        if asked.service not in ("", *_NAMES):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        async with self._called(context) as call:
            await call.run(self._app, "/health/ready", "GET")
        known = health_pb2.HealthCheckResponse
        return known(status=known.SERVING if call.status == 200 else known.NOT_SERVING)

    async def _reflect(self, requests: Any, context: Any) -> None:
        async with self._called(context) as call:
            await call.run(self._app, REFLECT)
            if call.status == 200:
                try:
                    async with asyncio.timeout(_REFLECT_S):
                        async for reply in reflection.aio.ReflectionServicer(_NAMES).ServerReflectionInfo(
                            requests, context
                        ):
                            await context.write(reply)
                except TimeoutError:
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "reflection took too long")
        await call.end()
