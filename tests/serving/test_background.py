"""A server in a thread: ready before the block runs, stopped after it, and an error at once if it does not start."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tripool.errors import EngineStopped
from tripool.serving.background import in_thread

DEADLINE_S = 60.0


def test_the_block_runs_between_ready_and_stop() -> None:
    events, stopped = [], threading.Event()

    def run(ready: Callable[[], object]) -> None:
        events.append("starts")
        ready()
        assert stopped.wait(DEADLINE_S)
        events.append("ends")

    with in_thread(run, stopped.set, start_s=DEADLINE_S):
        events.append("block")
    assert events == ["starts", "block", "ends"]


def test_a_server_that_ends_before_it_is_ready_is_an_error() -> None:
    with pytest.raises(EngineStopped, match="did not start"), in_thread(lambda ready: None, int, start_s=DEADLINE_S):
        pytest.fail("the block runs without a server")
