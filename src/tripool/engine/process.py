"""An engine in a process of its own: on a GPU, where launches and HTTP would compete for one interpreter's lock.

| process | thread | does |
|---|---|---|
| server | any event loop | sends commands, without waiting |
| server | tripool-engine | receives one report for each step, posts its events |
| engine | main | takes commands, steps, sends the report |
| engine | tripool-server-gone | sleeps until the server's end of the connection closes, and ends the process |

While the engine steps, none of its threads but the main one has work: nothing competes with a launch for the lock.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from tripool.core import ServingStats
from tripool.engine.backend import SHUT_DOWN, EngineBackend
from tripool.engine.driver import EngineDriver
from tripool.engine.wire import (
    Command,
    EngineFailed,
    EngineReady,
    OpenEngine,
    Progress,
    StartFailed,
    StepReport,
    StopEngine,
    encode,
    read_to_engine,
    read_to_server,
)
from tripool.engine_protocol import StepEngine
from tripool.errors import EngineStopped, TripoolError
from tripool.local_channel import StreamChannel

_LOG = logging.getLogger("tripool.engine")
_SILENCE_S = 600.0
"""Longest time between two messages of a process that loads its engine."""
_KILL_S = 30.0
"""For the system to take back the memory of a killed process."""
_SWITCH_S = 0.0005
"""The interpreter's switch interval, as in the gateway: a step beside which a grammar is compiled waits this long for
the lock, each time it has given it up, instead of 5 ms."""

Load = Callable[[OpenEngine, Callable[[str], None]], StepEngine]
"""Loads an engine; the second argument takes its progress."""


# ---- in the server --------------------------------------------------------------------------------------------------


class EngineProcess(EngineBackend):
    """When the process ends, open streams end with EngineStopped, and no request is served any more."""

    def __init__(
        self,
        opened: OpenEngine,
        command: Sequence[str],
        *,
        progress: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the process and waits until its engine is loaded. `command` starts it; `--channel` is added.

        Raises what the loading raises.
        """
        self._channel, theirs = StreamChannel.pair()
        with theirs:
            argv = [*command, "--channel", str(theirs.fileno())]
            # In a process group of its own: Ctrl-C reaches the server only, which drains its answers first.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), process_group=0
            )
        try:
            self.ready = self._started(opened, progress)
        except BaseException:
            self._kill()
            self._process.wait()
            self._channel.close()
            raise
        super().__init__(self.ready.name, self.ready.context_tokens, clock)
        self._latest = ServingStats()
        self._thread = threading.Thread(target=self._main, name="tripool-engine", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self, timeout_s: float) -> bool:
        """A process that does not stop in time is killed, except without a timeout: then it still stops by itself."""
        self._send(StopEngine())
        self._end(SHUT_DOWN)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and timeout_s > 0:
            _LOG.warning("engine process killed", extra={"engine": self.name, "child_pid": self.pid})
            self._kill()
            self._thread.join(_KILL_S)
        return not self._thread.is_alive()

    def _send(self, command: Command) -> None:
        self._channel.send_soon(encode(command))

    def _engine_stats(self) -> ServingStats:
        return self._latest

    def _started(self, opened: OpenEngine, progress: Callable[[str], None] | None) -> EngineReady:
        self._channel.send_soon(encode(opened))
        while True:
            try:
                received = self._channel.receive(_SILENCE_S)
            except ConnectionError:
                how = self._how_it_ended()
                hint = "see its log above; it starts again with the server"
                raise EngineStopped(f"the engine's process ended while it was loading: {how}", hint=hint) from None
            if not received:
                raise EngineStopped(f"the engine's process said nothing for {_SILENCE_S:g} s", hint="see its log")
            for data in received:
                message = read_to_server(data)
                if isinstance(message, EngineReady):
                    return message  # the last message before the first command
                if isinstance(message, StartFailed):
                    raise message.error
                if isinstance(message, Progress) and progress is not None:
                    progress(message.text)

    def _main(self) -> None:
        why = "the engine's process has ended"
        try:
            while True:
                for data in self._channel.receive(None):
                    message = read_to_server(data)
                    if isinstance(message, StepReport):
                        self._latest = message.stats
                        self._take_report(message)
                    elif isinstance(message, EngineFailed):
                        why = f"the engine failed: {message.kind}"
        except ConnectionError:
            pass
        except msgspec.DecodeError:  # memory of the other process is broken
            why = "the engine's process sent what is no message"
            self._kill()
        finally:
            was_alive = self.alive
            self._end(why)
            self._latest = replace(self._latest, running=0, waiting=0, kv_usage=0.0, held_by="")  # counters stay
            how = self._how_it_ended()
            if was_alive:
                _LOG.error("engine process ended", extra={"engine": self.name, "child_pid": self.pid, "how": how})
            self._channel.close()

    def _how_it_ended(self) -> str:
        """Waits for it: the connection closes a moment before. The memory of a large model takes a while to free."""
        try:
            code = self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


# ---- in the engine's process ----------------------------------------------------------------------------------------


def run_engine(channel: StreamChannel, load: Load) -> None:
    """Load the engine that the server names, and drive it until the server stops it or is gone.

    Signals to end are for the server, which drains its answers first; a service manager sends them to all processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(channel,), name="tripool-server-gone", daemon=True).start()
    opened = read_to_engine(channel.receive(None)[0])
    assert isinstance(opened, OpenEngine)
    try:
        engine = load(opened, lambda text: channel.send(encode(Progress(text))))
    except TripoolError as error:
        channel.send(encode(StartFailed(error)))
        return
    # What loading has left stays: a collection that looks through all of it would take as long as several steps.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    channel.send(encode(EngineReady.of(engine)))
    commands = _Commands(channel)
    try:
        EngineDriver(engine, commands.take, lambda report: channel.send(encode(report))).run()
    except ConnectionError:
        return  # the server is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(encode(EngineFailed(type(error).__name__)))
        raise


class _Commands:
    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel
        self._received: deque[bytes] = deque()

    def take(self, wait_s: float | None) -> Command | None:
        if not self._received:
            self._received.extend(self._channel.receive(wait_s))
            if not self._received:
                return None
        command = read_to_engine(self._received.popleft())
        assert not isinstance(command, OpenEngine)
        return command


def _end_with(channel: StreamChannel) -> None:
    """Also while a model is loaded or a step hangs. Nothing is to be cleaned up: the weight cache survives a kill."""
    channel.wait_closed()
    os.kill(os.getpid(), signal.SIGKILL)
