"""A worker's standing with the gateway: says Hello until it is welcome, pulses, and notices when the gateway is lost.

| it is lost when | noticed |
|---|---|
| the connection breaks (the gateway died, a cut) | at once |
| a Welcome names another epoch (a new gateway behind the same address) | at once |
| it is silent for `SILENCE_S`; it answers every pulse | then |

Whoever loses the gateway holds nothing any more: the gateway, old or new, takes a Hello to say so.

Pulses come from a thread with a line of its own, so that a long step is no silence. A stopped or frozen process is
silent, and steps that never end are seen by their count, which every pulse tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from tripool.fabric.channel import Line, identity_of
from tripool.messages import AnyMessage, Heartbeat, Hello, Welcome

SILENCE_S = 3.0
_HELLO_S = 0.2
"""Between two Hellos that nobody answers."""
_JOIN_S = 2.0


class Link:
    def __init__(self, address: str, hello: Hello, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._hello, self._clock = address, hello, clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._num_lines = 0
        self._epoch: int | None = None
        self._heard_s = clock()
        self._hello_s = float("-inf")
        self._line = self._new_line()
        self._heartbeats = _Heartbeats(self._context, address, f"{self._identity}.pulse")

    @property
    def welcome(self) -> bool:
        return self._epoch is not None

    @property
    def silent_s(self) -> float:
        """How long nothing was heard of any gateway."""
        return self._clock() - self._heard_s

    def send(self, message: AnyMessage) -> None:
        if self.welcome:
            self._line.send(message)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """What the next pulses say."""
        self._heartbeats.latest = heartbeat if self.welcome else None

    def poll(self, timeout_s: float) -> list[AnyMessage] | None:
        """What the gateway sent, waiting up to `timeout_s` for it. None: the gateway is lost."""
        if not self.welcome:
            self._say_hello()
            timeout_s = min(timeout_s, _HELLO_S)
        poller = zmq.Poller()
        for source in (self._line.socket, self._line.monitor):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        if self._line.broken:
            self._lose()
            return None
        received: list[AnyMessage] = []
        for message in self._line.receive():
            self._heard_s = self._clock()
            if not isinstance(message, Welcome):
                received += [message] if self.welcome else []  # what comes before is of an earlier session
            elif self._epoch is None:
                self._epoch = message.gateway_epoch
                self._heartbeats.every_s = message.heartbeat_s
            elif message.gateway_epoch != self._epoch:
                self._lose()
                return None
        if self.welcome and self.silent_s > SILENCE_S:
            self._lose()
            return None
        return received

    def close(self) -> None:
        """What was sent is given a moment to leave."""
        self._heartbeats.stop()
        self._line.close(linger_ms=200)
        self._context.term()

    def _lose(self) -> None:
        self._heartbeats.latest = None
        self._epoch = None
        self._line.close()
        self._line = self._new_line()

    def _new_line(self) -> Line:
        self._num_lines += 1
        return Line(self._context, self._address, self._identity)

    @property
    def _identity(self) -> str:
        """Another one for every line: what is sent to an old one goes nowhere."""
        return f"{identity_of(self._hello.worker_id)}{self._num_lines}"

    def _say_hello(self) -> None:
        now_s = self._clock()
        if now_s - self._hello_s >= _HELLO_S:
            self._hello_s = now_s
            self._line.send(self._hello)


class _Heartbeats:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
        self.every_s = 1.0
        self.latest: Heartbeat | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(context, address, identity), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_JOIN_S)

    def _main(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
        line = Line(context, address, identity)
        while not self._stopped.wait(self.every_s / 2 if self.latest is not None else 0.02):
            heartbeat = self.latest
            if heartbeat is not None:
                line.send(heartbeat)
        line.close()
