"""What the servers of one process and of several have in common: they are built, run, stopped and closed alike."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from tripool.errors import EngineStopped
from tripool.gateway.server import url_of

_LOOK_S = 0.1
"""How soon the end of a server that does not start is noticed."""
_START_S = 600.0
_STOP_S = 60.0


class BuiltServer(ABC):
    """`run` blocks; `running` serves in a thread beside the caller. Use it with `with`, or `close` it."""

    def __init__(self, listener: socket.socket, grpc_address: str | None = None) -> None:
        self.listener, self.grpc_address = listener, grpc_address
        self.closing = ExitStack()
        """Runs when the server is closed, last."""

    @property
    def url(self) -> str:
        return url_of(self.listener)

    @abstractmethod
    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop`. `on_ready` is called once requests are answered."""

    @abstractmethod
    def stop(self) -> None:
        """From any thread: `run` gives open answers a few seconds, and returns."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread while a `with` block runs."""
        ready = threading.Event()
        thread = threading.Thread(target=self.run, args=(ready.set,), name="tripool-server")
        thread.start()
        try:
            deadline_s = time.monotonic() + _START_S
            while not ready.wait(_LOOK_S):
                if not thread.is_alive() or time.monotonic() > deadline_s:
                    raise EngineStopped("the server did not start", hint="its log says more")
            yield
        finally:
            self.stop()
            thread.join(_STOP_S)

    def close(self) -> None:
        """Free all that the server holds."""
        self.closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
