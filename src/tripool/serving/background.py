"""Runs a blocking server in a thread while a block of the caller runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tripool.errors import EngineStopped

_STOP_S = 60.0


@contextmanager
def in_thread(
    run: Callable[[Callable[[], object]], None], stop: Callable[[], None], *, start_s: float
) -> Iterator[None]:
    """`run` takes what it calls once it is ready, and returns soon after `stop`."""
    ready = threading.Event()
    thread = threading.Thread(target=run, args=(ready.set,), name="tripool-server")
    thread.start()
    try:
        if not ready.wait(start_s):
            raise EngineStopped("the server did not start", hint="its log says more")
        yield
    finally:
        stop()
        thread.join(_STOP_S)
