"""The loop that every worker runs: receive messages, work, update the heartbeat. The role knows what the work is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from tripool.fabric.link import SILENCE_S, Link
from tripool.messages import AnyMessage, Drain, Heartbeat, Left, WorkerId

_LOG = logging.getLogger("tripool.worker")
_IDLE_S = 0.1
"""Longest wait for a message while there is nothing to do: deadlines are checked this often."""
_MOVING_S = 0.001
"""While blocks are being moved but nothing is computed."""


class RoleWorker(Protocol):
    """Prefill or decode: messages in, messages out by the `send` it was made with. Never waits for a message."""

    @property
    def busy(self) -> bool:
        """A step would have something to do."""

    @property
    def moving(self) -> bool:
        """Some KV is on its way out or in, or waits for room."""

    @property
    def blocked(self) -> bool:
        """What moves cannot go on before a message or a deadline."""

    @property
    def placed(self) -> set[str]:
        """The names of what its engine has."""

    def receive(self, message: AnyMessage, now_s: float) -> None: ...

    def work(self, now_s: float) -> None:
        """One step, and a bounded share of what else is due."""

    def drop(self) -> None:
        """Forget everything at once: the coordinator is lost."""

    def heartbeat(self) -> Heartbeat: ...


class SupervisorEnd(Protocol):
    """A worker's end of the channel to its supervisor."""

    @property
    def ended(self) -> bool: ...

    def receive(self) -> Iterable[AnyMessage]: ...


class Loop:
    """With a `supervisor_channel` it ends when both supervisor and coordinator are gone."""

    def __init__(
        self,
        link: Link,
        worker: RoleWorker,
        worker_id: WorkerId,
        *,
        supervisor_channel: SupervisorEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._worker, self._worker_id = link, worker, worker_id
        self._supervisor_channel, self._clock = supervisor_channel, clock
        self._draining = False
        self._stopped = False
        self._why = "signal"

    def stop(self) -> None:
        """May be called by a signal handler: the loop says goodbye and ends."""
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            self._turn()
        self._worker.drop()
        self._link.send(Left(self._worker_id))
        _LOG.info("stopped", extra={"reason": self._why})

    def _turn(self) -> None:
        worker, link = self._worker, self._link
        wait_s = 0.0 if worker.busy else _MOVING_S if worker.moving and not worker.blocked else _IDLE_S
        welcome = link.welcome
        messages = link.poll(wait_s)
        now_s = self._clock()
        if messages is None:
            if welcome:
                _LOG.info("coordinator lost", extra={"blocks_dropped": worker.heartbeat().blocks_held})
            worker.drop()
            messages = []
        for message in messages:
            if isinstance(message, Drain):
                self._draining = True
            else:
                worker.receive(message, now_s)
        link.heartbeat(worker.heartbeat())
        worker.work(now_s)
        link.heartbeat(worker.heartbeat())
        self._consider_leaving()

    def _consider_leaving(self) -> None:
        """When drained; and when neither supervisor nor coordinator is there any more."""
        if self._supervisor_channel is not None:
            for _ in self._supervisor_channel.receive():
                pass
            alone = self._supervisor_channel.ended and not self._link.welcome and self._link.silent_s > SILENCE_S
            if alone:
                self._stopped, self._why = True, "neither supervisor nor coordinator is there"
        idle = not (self._worker.busy or self._worker.moving)
        if self._draining and self._worker.heartbeat().blocks_held == 0 and idle:
            self._stopped, self._why = True, "drained"
