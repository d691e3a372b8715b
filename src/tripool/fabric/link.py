"""A worker's session with the coordinator: says Hello until it is welcome, sends heartbeats, notices its loss.

| the coordinator is lost when | noticed |
|---|---|
| the channel breaks (the coordinator died, the connection was cut) | at once |
| a Welcome names another epoch (a new coordinator behind the same address) | at once |
| nothing is heard for `SILENCE_S`; the coordinator answers every heartbeat | then |

A worker that loses the coordinator drops everything it holds: the coordinator, old or new, takes a Hello to say so. One
of a lower epoch than another before was stopped meanwhile, and is refused.

Heartbeats have a channel and a sender of their own, so that a long step is no silence. A stopped process is silent, and
steps that never end show in the step count of the heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tripool.fabric.channel import Channel, Transport, identity_of
from tripool.messages import AnyMessage, Heartbeat, Hello, Welcome

SILENCE_S = 3.0
_HELLO_S = 0.2
"""Between two Hellos without an answer."""


class Link:
    def __init__(self, transport: Transport, hello: Hello, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport, self._hello, self._clock = transport, hello, clock
        self._num_channels = 0
        self._epoch: int | None = None
        self._highest_epoch = 0
        """Of any coordinator that has welcomed this worker: those of lower ones decide nothing any more."""
        self._heard_s = clock()
        self._hello_s = float("-inf")
        self._channel = self._connect()
        self._heartbeats = transport.heartbeats(f"{self._identity}.heartbeat")

    @property
    def welcome(self) -> bool:
        return self._epoch is not None

    @property
    def epoch(self) -> int | None:
        """Of the coordinator that this worker believes; None: of none just now."""
        return self._epoch

    @property
    def silent_s(self) -> float:
        """Time since the last message of any coordinator."""
        return self._clock() - self._heard_s

    def send(self, message: AnyMessage) -> None:
        if self.welcome:
            self._channel.send(message)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """What the next heartbeats say."""
        self._heartbeats.latest = heartbeat if self.welcome else None

    def poll(self, timeout_s: float) -> list[AnyMessage] | None:
        """What the coordinator sent, waiting up to `timeout_s` for it. None: it is lost."""
        if not self.welcome:
            self._say_hello()
            timeout_s = min(timeout_s, _HELLO_S)
        self._channel.wait(timeout_s)
        if self._channel.broken:
            self._lose()
            return None
        received: list[AnyMessage] = []
        for message in self._channel.receive():
            self._heard_s = self._clock()
            if not isinstance(message, Welcome):
                received += [message] if self.welcome else []  # what comes before is of an earlier session
            elif message.epoch < self._highest_epoch:
                self._lose()
                return None
            elif self._epoch is None:
                self._epoch = self._highest_epoch = message.epoch
                self._heartbeats.every_s = message.heartbeat_s
            elif message.epoch != self._epoch:
                self._lose()
                return None
        if self.welcome and self.silent_s > SILENCE_S:
            self._lose()
            return None
        return received

    def close(self) -> None:
        """What was sent is given a moment to leave."""
        self._heartbeats.stop()
        self._channel.close(linger_ms=200)
        self._transport.close()

    def _lose(self) -> None:
        self._heartbeats.latest = None
        self._heartbeats.reconnect()
        self._epoch = None
        self._channel.close()
        self._channel = self._connect()

    def _connect(self) -> Channel:
        self._num_channels += 1
        return self._transport.connect(self._identity)

    @property
    def _identity(self) -> str:
        """Another one for every channel: what is sent to an old one goes nowhere."""
        return f"{identity_of(self._hello.worker_id)}{self._num_channels}"

    def _say_hello(self) -> None:
        now_s = self._clock()
        if now_s - self._hello_s >= _HELLO_S:
            self._hello_s = now_s
            self._channel.send(self._hello)
