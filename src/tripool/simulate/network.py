"""Connections between the gateway and workers in virtual time: ordered, and lossy only where they break.

Between hosts they are as slow, or as cut off, as the path between the two is (`simulate/hosts.py`).

A worker has a channel of its own for every session. What was sent by an earlier one is dropped: the gateway answers by
the channel of the last Hello, and ignores what comes by others, as `coordinator/pools.py` does.

There may be several ends (`End`) at the gateway's side, of coordinators of which one shall lead: a channel leads to the
one that listened when it was made.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tripool.messages import AnyMessage, Heartbeat, Hello, Left, ToWorker, WorkerId
from tripool.simulate.hosts import GATEWAY_HOST, Hosts
from tripool.simulate.process import Process
from tripool.simulate.rng import Rng
from tripool.simulate.timeline import Timeline

_LATENCY_S = (0.0002, 0.003)
_POLL_S = 0.001
"""From a message's arrival to its being read by a worker that is idle."""
_TURN_S = 0.001
"""Time that a turn of a worker's loop takes in which nothing is computed."""
_NO_HEARTBEAT_S = 0.05
"""Between two looks for a heartbeat to send."""

_Sent = tuple[WorkerId, str, AnyMessage, int]
"""Sender, identity of its channel, message, and the number of the end it goes to."""


@dataclass(slots=True)
class End:
    """Where workers' messages come to."""

    to_gateway: Callable[[WorkerId, AnyMessage], None] = lambda worker_id, message: None
    """Takes what arrives there."""
    knows: Callable[[WorkerId], bool] = lambda worker_id: False
    """Whether the gateway counts on a worker."""
    sessions: dict[WorkerId, str] = field(default_factory=dict)
    """The channel by which each worker said Hello last."""


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
    channel: SimChannel | None = None
    """The worker's newest."""


class Network:
    def __init__(self, timeline: Timeline, rng: Rng, workers: Iterable[str], hosts: Hosts | None = None) -> None:
        self._timeline, self._rng = timeline, rng
        self.hosts = hosts or Hosts()
        self._links = {worker: _Link() for worker in workers}
        self.ends = [End()]
        self.pick_end: Callable[[], int | None] = lambda: 0
        """To which of them a new channel leads; None: none listens, and it connects later."""
        self.seen: Counter[str] = Counter()

    def is_up(self, worker: str) -> bool:
        return self._links[worker].up

    def send_to_worker(self, worker_id: WorkerId, message: ToWorker, end: int = 0) -> None:
        link, session = self._links[worker_id.name], self.ends[end].sessions.get(worker_id)
        if link.up and session is not None:
            path = GATEWAY_HOST, self.hosts.of(worker_id.name)
            latency_s = self._rng.uniform(*_LATENCY_S) + self.hosts.delay_s(*path)
            link.to_worker_s = max(link.to_worker_s, self._timeline.now_s + latency_s)
            reach = (self._reach_worker, worker_id, session, link.break_count, message, end)
            self._timeline.call_at(link.to_worker_s, self.hosts.carry, *path, *reach)

    def connect(self, channel: SimChannel) -> None:
        self._links[channel.worker_id.name].channel = channel

    def disconnect(self, worker: str) -> None:
        """The worker's end notices that its connection broke."""
        channel = self._links[worker].channel
        if channel is not None:
            channel.break_off()

    def end_of(self, worker: str) -> int | None:
        """To which end its channel leads."""
        channel = self._links[worker].channel
        return channel.connected() if channel is not None else None

    def end_closed(self, end: int) -> None:
        """Its process has died: all that lead there notice."""
        self.ends[end].sessions.clear()
        for link in self._links.values():
            if link.channel is not None and link.channel.end == end:
                link.channel.break_off()

    def send_to_gateway(self, worker_id: WorkerId, session: str, message: AnyMessage, end: int | None = 0) -> None:
        link = self._links[worker_id.name]
        if end is None:
            return
        if link.up:
            self._post(link, (worker_id, session, message, end))
        elif link.keeps:
            link.kept.append((worker_id, session, message, end))

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
        self.ends[0].sessions.clear()

    def _post(self, link: _Link, sent: _Sent) -> None:
        path = self.hosts.of(sent[0].name), GATEWAY_HOST
        latency_s = self._rng.uniform(*_LATENCY_S) + self.hosts.delay_s(*path)
        link.to_gateway_s = max(link.to_gateway_s, self._timeline.now_s + latency_s)
        reach = (self._reach_gateway, link, link.break_count, sent)
        self._timeline.call_at(link.to_gateway_s, self.hosts.carry, *path, *reach)

    def _reach_worker(self, worker_id: WorkerId, session: str, break_count: int, message: ToWorker, end: int) -> None:
        link = self._links[worker_id.name]
        if break_count != link.break_count or link.channel is None:
            return
        if link.channel.identity == session and link.channel.end == end:
            self._timeline.note(f"{type(message).__name__} reaches {worker_id}")
            link.channel.arrive(message)

    def _reach_gateway(self, link: _Link, break_count: int, sent: _Sent) -> None:
        if break_count != link.break_count:
            return
        worker_id, session, message, number = sent
        end = self.ends[number]
        if isinstance(message, Hello):
            if end.sessions.get(worker_id) == session and end.knows(worker_id):
                return  # said again before the Welcome came
            end.sessions[worker_id] = session
        elif isinstance(message, Heartbeat):
            if worker_id not in end.sessions:
                return
        elif end.sessions.get(worker_id) != session:
            self.seen["messages of an earlier session"] += 1
            return
        end.to_gateway(worker_id, message)
        if isinstance(message, Left):
            del end.sessions[worker_id]


class SimTransport:
    """A worker's `Transport`."""

    def __init__(self, network: Network, timeline: Timeline, worker_id: WorkerId, process: Process) -> None:
        self._network, self._timeline, self._worker_id, self._process = network, timeline, worker_id, process

    def connect(self, identity: str) -> SimChannel:
        channel = SimChannel(self._network, self._timeline, self._worker_id, self._process, identity)
        self._network.connect(channel)
        return channel

    def heartbeats(self, identity: str) -> SimHeartbeats:
        return SimHeartbeats(self._network, self._timeline, self._worker_id, self._process, identity)

    def close(self) -> None:
        pass


class SimChannel:
    """A worker's `Channel`."""

    def __init__(
        self, network: Network, timeline: Timeline, worker_id: WorkerId, process: Process, identity: str
    ) -> None:
        self.worker_id, self.identity, self.end = worker_id, identity, network.pick_end()
        self.broken = False
        self._network, self._timeline, self._process = network, timeline, process
        self._arrived: deque[ToWorker] = deque()

    def send(self, message: AnyMessage) -> None:
        self._network.send_to_gateway(self.worker_id, self.identity, message, self.connected())

    def connected(self) -> int | None:
        if self.end is None:
            self.end = self._network.pick_end()
        return self.end

    def wait(self, timeout_s: float) -> None:
        now_s = self._timeline.now_s
        if timeout_s == 0.0 and self._process.turn_s == now_s:
            timeout_s = _TURN_S  # a loop that does nothing would never let time pass
        if timeout_s and not (self._arrived or self.broken):
            self._process.wait(now_s + timeout_s, "poll", wakes=True)
        self._process.turn_s = self._timeline.now_s

    def receive(self) -> Iterator[ToWorker]:
        while self._arrived:
            yield self._arrived.popleft()

    def close(self, *, linger_ms: int = 0) -> None:
        self._arrived.clear()

    def arrive(self, message: ToWorker) -> None:
        self._arrived.append(message)
        self._process.wake(self._timeline.now_s + _POLL_S)

    def break_off(self) -> None:
        self.broken = True
        self._process.wake(self._timeline.now_s)


class SimHeartbeats:
    """A worker's `HeartbeatSender`: silent while its process is stopped, and after its end."""

    def __init__(
        self, network: Network, timeline: Timeline, worker_id: WorkerId, process: Process, identity: str
    ) -> None:
        self.every_s = 1.0
        self.latest: Heartbeat | None = None
        self._network, self._timeline, self._worker_id, self._process = network, timeline, worker_id, process
        self._identity, self._ended = identity, False
        timeline.call_at(timeline.now_s, self._beat)

    def reconnect(self) -> None:
        """They follow the channel."""

    def stop(self) -> None:
        self._ended = True

    def _beat(self) -> None:
        if self._ended or self._process.dead:
            return
        if self.latest is not None and not self._process.stopped:
            end = self._network.end_of(self._worker_id.name)
            self._network.send_to_gateway(self._worker_id, self._identity, self.latest, end)
        pause_s = self.every_s / 2 if self.latest is not None else _NO_HEARTBEAT_S
        self._timeline.call_at(self._timeline.now_s + pause_s, self._beat)
