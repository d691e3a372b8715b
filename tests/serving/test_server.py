"""A server in a thread: ready before the block runs, stopped after it, and an error at once if it does not start."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tripool.errors import EngineStopped
from tripool.gateway.server import listen
from tripool.serving.server import BuiltServer

DEADLINE_S = 60.0


class Scripted(BuiltServer):
    def __init__(self, listener, *, starts: bool) -> None:
        super().__init__(listener)
        self.events, self._starts, self._stopped = [], starts, threading.Event()
        self.closing.callback(self.events.append, "closed")

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        if self._starts:
            self.events.append("ready")
            on_ready()
            assert self._stopped.wait(DEADLINE_S)
        self.events.append("returned")

    def stop(self) -> None:
        self._stopped.set()


def test_the_block_runs_between_ready_and_stop() -> None:
    with listen("127.0.0.1", 0) as listener, Scripted(listener, starts=True) as server:
        with server.running():
            server.events.append("block")
        assert server.events == ["ready", "block", "returned"]
    assert server.events[-1] == "closed"


def test_a_server_that_ends_before_it_is_ready_is_an_error() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        Scripted(listener, starts=False) as server,
        pytest.raises(EngineStopped, match="did not start"),
        server.running(),
    ):
        pytest.fail("the block runs without a server")
    assert server.events == ["returned", "closed"]
