"""Runs a blocking server in a thread while a block of the caller runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tripool.errors import EngineStopped

_LOOK_S = 0.1
"""How soon the end of a server that does not start is noticed."""
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
        deadline_s = time.monotonic() + start_s
        while not ready.wait(_LOOK_S):
            if not thread.is_alive() or time.monotonic() > deadline_s:
                raise EngineStopped("the server did not start", hint="its log says more")
        yield
    finally:
        stop()
        thread.join(_STOP_S)
