"""The HTTP server around the application: a listening socket, a word when it is ready, a bounded shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tripool.errors import TripoolError

_DRAIN_S = 3
"""How long open answers may go on after a signal to stop; then they are told that the engine has stopped."""
_CUT_S = 3
"""How much longer before connections that are still open are cut."""


class CannotListen(TripoolError):
    code = "cannot_listen"


def listen(host: str, port: int) -> socket.socket:
    """Bound before a model is loaded, so that a taken port is said at once. Port 0 picks a free one."""
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        hint = "choose another with --port, or 0 for any free one"
        raise CannotListen(f"cannot listen on {host} port {port}: {error.strerror}", hint=hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until `should_exit` or a signal.

    `on_ready` is called once connections are accepted. `end_answers` is called, and must not block, when answers are
    still open some seconds after the end was asked for: it makes the backend end them with an error.
    """

    def __init__(self, app: FastAPI, *, on_ready: Callable[[], object], end_answers: Callable[[], object]) -> None:
        bound_s = _DRAIN_S + _CUT_S
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=bound_s
            )
        )
        self._on_ready, self._end_answers = on_ready, end_answers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drained = asyncio.get_running_loop().call_later(_DRAIN_S, self._end_answers)
        await super().shutdown(sockets)
        drained.cancel()
