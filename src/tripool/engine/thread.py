"""An engine driven by a thread of the server's process: on a CPU, whose kernels run without the interpreter's lock."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from tripool.core import ServingStats
from tripool.engine.backend import SHUT_DOWN, EngineBackend
from tripool.engine.driver import EngineDriver
from tripool.engine.wire import Command, StopEngine
from tripool.engine_protocol import StepEngine


class EngineThread(EngineBackend):
    """A step that hangs holds only this thread."""

    def __init__(self, engine: StepEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(engine.name, engine.context_tokens, clock)
        self._engine = engine
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._driver = EngineDriver(engine, self._next, self._take_report, clock=clock)
        self._thread = threading.Thread(target=self._main, name="tripool-engine", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        self._commands.put(StopEngine())
        self._thread.join(timeout_s)
        self._end(SHUT_DOWN)
        return not self._thread.is_alive()

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _engine_stats(self) -> ServingStats:
        return self._engine.stats()

    def _next(self, wait_s: float | None) -> Command | None:
        try:
            return self._commands.get(block=wait_s != 0.0, timeout=wait_s)
        except Empty:
            return None

    def _main(self) -> None:
        try:
            self._driver.run()
            self._end(SHUT_DOWN)
        finally:  # not an except: a failure goes on to the thread's own hook, which prints it
            # Clients get only the kind of failure: its text may contain words of another request.
            self._end(f"the engine failed: {type(sys.exception()).__name__}")
