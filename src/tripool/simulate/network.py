"""Connections between the gateway and workers in virtual time: ordered, and lossy only where they break. Pure.

A worker has a line of its own for every session. What was sent on an earlier one reaches nobody: the gateway answers on
the line that it was last said Hello on, and drops what comes from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tripool.messages import AnyMessage, Hello, WorkerId
from tripool.simulate.clock import Clock
from tripool.simulate.rng import Rng

_LATENCY_S = (0.0002, 0.003)

_Sent = tuple[WorkerId, int, AnyMessage]
"""Sender, its session, message."""


@dataclass(slots=True)
class _Link:
    up: bool = True
    break_count: int = 0
    """What was on its way at a break never arrives."""
    keeps: bool = False
    """While it is down: whether the worker's end keeps what it sends, or loses it."""
    kept: list[_Sent] = field(default_factory=list)
    to_gateway_s: float = 0.0
    to_worker_s: float = 0.0
    """When the newest message each way arrives: none overtakes it."""


class Network:
    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        workers: list[str],
        to_worker: Callable[[WorkerId, int, AnyMessage], None],
        to_gateway: Callable[[WorkerId, AnyMessage], None],
    ) -> None:
        """`to_worker` and `to_gateway` take what arrives."""
        self._clock, self._rng = clock, rng
        self._to_worker, self._to_gateway = to_worker, to_gateway
        self._links = {worker: _Link() for worker in workers}
        self._sessions: dict[WorkerId, int] = {}
        """The gateway's end: the session in which each life said Hello last."""
        self.seen: Counter[str] = Counter()

    def is_up(self, worker: str) -> bool:
        return self._links[worker].up

    def send_to_worker(self, worker_id: WorkerId, message: AnyMessage) -> None:
        link, session = self._links[worker_id.name], self._sessions.get(worker_id)
        if link.up and session is not None:
            link.to_worker_s = max(link.to_worker_s, self._clock.now_s + self._rng.uniform(*_LATENCY_S))
            self._clock.at(link.to_worker_s, self._reach_worker, worker_id, session, link.break_count, message)

    def send_to_gateway(self, worker_id: WorkerId, session: int, message: AnyMessage) -> None:
        link = self._links[worker_id.name]
        if link.up:
            self._post(link, (worker_id, session, message))
        elif link.keeps:
            link.kept.append((worker_id, session, message))

    def break_link(self, worker: str, *, keeps: bool) -> None:
        link = self._links[worker]
        link.up, link.keeps = False, keeps
        link.break_count += 1
        link.kept.clear()

    def mend_link(self, worker: str) -> None:
        link = self._links[worker]
        link.up = True
        for sent in link.kept:
            self._post(link, sent)
        link.kept.clear()

    def lose_sent(self, worker: str) -> None:
        """A process died with what it had sent and was not delivered yet."""
        self._links[worker].break_count += 1

    def forget_sessions(self) -> None:
        """The gateway died."""
        self._sessions.clear()

    def _post(self, link: _Link, sent: _Sent) -> None:
        link.to_gateway_s = max(link.to_gateway_s, self._clock.now_s + self._rng.uniform(*_LATENCY_S))
        self._clock.at(link.to_gateway_s, self._reach_gateway, link, link.break_count, sent)

    def _reach_worker(self, worker_id: WorkerId, session: int, break_count: int, message: AnyMessage) -> None:
        if break_count == self._links[worker_id.name].break_count:
            self._to_worker(worker_id, session, message)

    def _reach_gateway(self, link: _Link, break_count: int, sent: _Sent) -> None:
        if break_count != link.break_count:
            return
        worker_id, session, message = sent
        if isinstance(message, Hello):
            self._sessions[worker_id] = session
        elif self._sessions.get(worker_id) != session:
            self.seen["messages of an earlier session"] += 1
            return
        self._to_gateway(worker_id, message)
