"""The HTTP server: a listening socket, a ready callback, a bounded shutdown."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from tripool.errors import TripoolError
from tripool.gateway.connection import Connection
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.connection_table import ConnectionTable
from tripool.gateway.request_log import is_wanted

if TYPE_CHECKING:
    from tripool.gateway.batches import BatchService
    from tripool.gateway.grpc.server import GrpcServer

_SWITCH_S = 0.0005
"""The interpreter's switch interval: how long a thread waits for one that runs Python, e.g. parsing a long body. With
the default of 5 ms, a first token that passes through three threads waits that long many times."""
_LOG = logging.getLogger("tripool.gateway")
_DRAIN_S = 3
"""How long open answers may go on after a signal to stop; then they end with an error."""
_CUT_S = 3
"""How much longer until open connections are cut."""
_SPARE_FILES = 1024
"""File descriptors for all except connections: pools, disks, models, and connections that are accepted before others
are closed for them."""
_SEND_BYTES = 2**16
"""Send buffer of a connection. The system's default would hold megabytes for a client that reads nothing."""


class CannotListen(TripoolError, code="cannot_listen"):
    """The address cannot be listened on."""


def listen(host: str, port: int, *, option: str = "--port", shared: bool = False) -> socket.socket:
    """Bound before a model is loaded, so that a port in use is reported at once. Port 0 picks a free one.

    `shared`: other sockets of this user may be bound to the same address.
    """
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)  # connections inherit it
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        hint = f"choose another with {option}, or 0 for any free one"
        raise CannotListen(f"cannot listen on {host} port {port}: {error.strerror}", hint=hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_connections(max_open: int) -> int:
    """Raise the file limit for so many connections. Returns how many there may be: an `accept` without a free
    descriptor would stop the listener."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_open + _SPARE_FILES
    if soft < wanted and soft != hard:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max_open if soft >= wanted else max(1, soft - min(_SPARE_FILES, soft // 2))


class Server(uvicorn.Server):
    """Serves until `should_exit` or a signal.

    `on_ready` is called once connections are accepted. `end_answers` is called, and must not block, when answers are
    still open some seconds after the shutdown began: it makes the backend end them with an error.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        on_ready: Callable[[], object],
        end_answers: Callable[[], object],
        limits: ConnectionLimits | None = None,
        grpc_address: str | None = None,
    ) -> None:
        # No handlers of its own: uvicorn logs to the root logger. Below a warning it quotes paths and queries.
        logging.getLogger("uvicorn.error").addFilter(is_wanted)
        limits = limits or ConnectionLimits()
        self.connections: ConnectionTable[Connection] = ConnectionTable(allow_connections(limits.max_open))
        connection: Any = partial(
            Connection, table=self.connections, limits=limits, on_ended=app.state.on_connection_ended
        )
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_DRAIN_S + _CUT_S,
        )
        super().__init__(config)
        self._on_ready, self._end_answers = on_ready, end_answers
        self._batches: BatchService = app.state.batches
        self._grpc = None if grpc_address is None else _grpc_server(app, grpc_address, limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(_SWITCH_S)
        await super().startup(sockets)
        if self.started:
            if self._grpc is not None:
                await self._grpc.start()
            self._batches.start()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        signals = [signal.Signals(number).name for number in self._captured_signals]
        _LOG.info("stopping", extra={"signal": signals[0] if signals else None, "open": len(self.server_state.tasks)})
        await self._batches.stop()
        drained = asyncio.get_running_loop().call_later(_DRAIN_S, self._end_answers)
        ending = [super().shutdown(sockets)]
        if self._grpc is not None:
            ending.append(self._grpc.stop(_DRAIN_S + _CUT_S))
        await asyncio.gather(*ending)
        drained.cancel()


def _grpc_server(app: FastAPI, address: str, limits: ConnectionLimits) -> GrpcServer:
    from tripool.gateway.grpc.server import GrpcServer  # here: its packages may be missing

    return GrpcServer(app, address, max_bytes=app.state.max_body_bytes, limits=limits)
