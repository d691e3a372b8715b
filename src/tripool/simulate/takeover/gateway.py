"""A gateway in virtual time with its clients, and its lines to coordinators."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tripool.core import FinishReason, TokenEvent
from tripool.errors import TripoolError
from tripool.router.gateway_session import GatewaySession, Resumption, Submission
from tripool.router.held import Taken
from tripool.router.kept_types import Count, Keyed
from tripool.router.sessions import Failure, ForGateway
from tripool.simulate.request_table import Arrival

if TYPE_CHECKING:
    from tripool.simulate.takeover.coordinator import CoordinatorRun
    from tripool.simulate.takeover.world import TakeoverWorld

_LATENCY_S = (0.0001, 0.002)
_LOOK_S, _AGAIN_S = 0.25, 0.05


class Line:
    """A connection of a gateway to a coordinator: ordered both ways, until one end of it dies or it is cut."""

    def __init__(self, world: TakeoverWorld, gateway: SimGateway, run: CoordinatorRun, number: int) -> None:
        self._world, self.gateway, self.run = world, gateway, run
        self.identity = b"%d.%d" % (gateway.number, number)
        self.alive = True
        self._there_s = self._back_s = 0.0
        self._send(run.hello, self)

    def send(self, message: Any) -> None:
        self._send(self.run.from_gateway, self, message)

    def _send(self, action: Any, *args: Any) -> None:
        self._there_s = max(self._there_s, self._world.now_s + self._world.rng.uniform(*_LATENCY_S))
        self._world.timeline.call_at(self._there_s, self._arrive_there, action, args)

    def _arrive_there(self, action: Any, args: tuple[Any, ...]) -> None:
        if self.alive:
            self.run.do(action, *args)

    def welcome(self, epoch: int) -> None:
        self._back(self.gateway.welcomed, epoch)

    def to_gateway(self, items: list[ForGateway]) -> None:
        self._back(self.gateway.receive, items)

    def refuse(self, request_ids: list[str], error: TripoolError) -> None:
        self._back(self.gateway.receive, [Failure(request_id, error) for request_id in request_ids])

    def _back(self, action: Any, what: Any) -> None:
        self._back_s = max(self._back_s, self._world.now_s + self._world.rng.uniform(*_LATENCY_S))
        self._world.timeline.call_at(self._back_s, self._arrive_back, action, what)

    def _arrive_back(self, action: Any, what: Any) -> None:
        if self.alive and self.gateway.line is self:
            action(self, what)

    def cut(self) -> None:
        """Both ends notice."""
        if self.alive:
            self.alive = False
            self.run.do(self.run.gone, self)
            if self.gateway.line is self:
                self.gateway.lost("its connection ended")


@dataclass(slots=True, eq=False)
class Client:
    name: str
    arrival: Arrival
    keyed: Keyed | None
    answers: list[tuple[list[int], FinishReason]]
    num_seen: list[int] = field(default_factory=list)
    """Tokens of each choice, over all its attempts."""
    num_now: list[int] = field(default_factory=list)
    """Of the present attempt, which begins anew."""
    num_attempts: int = 0
    outcome: str = ""

    @property
    def done(self) -> bool:
        return all(seen == len(tokens) for seen, (tokens, _) in zip(self.num_seen, self.answers, strict=True))


class SimGateway:
    """`session` is the one that serves."""

    def __init__(self, world: TakeoverWorld, number: int) -> None:
        self._world, self.number, self.dead = world, number, False
        self.session: GatewaySession[Client] = GatewaySession(world.now_s)
        self.line: Line | None = None
        self._num_lines = 0
        self._connect()
        self._look()

    # ---- clients ----------------------------------------------------------------------------------------------------

    def ask(self, client: Client) -> None:
        client.num_attempts += 1
        client.num_now = [0] * len(client.answers)
        request = replace(client.arrival.request, id=f"{client.name}.{client.num_attempts}")
        submission = Submission("m", (request,), client.arrival.tenant, client.keyed)
        if self.session.submit(submission, client, self._world.now_s):
            self._send(submission)

    def hang_up(self, client: Client) -> None:
        for request_id, one in list(self.session.open.items()):
            if one.reader is client:
                self.session.close(request_id)
                self._send(("cancel", request_id))

    def kill(self) -> list[Client]:
        """Its clients, cut off."""
        self.dead = True
        line, self.line = self.line, None
        if line is not None:
            line.cut()
        return [one.reader for one in self.session.open.values()]

    # ---- the coordinator --------------------------------------------------------------------------------------------

    def _send(self, message: Any) -> None:
        if self.session.welcome and self.line is not None:
            self.line.send(message)

    def _connect(self) -> None:
        if self.dead or self.line is not None:
            return
        run = self._world.address()
        if run is None:
            self._world.timeline.call_at(self._world.now_s + _AGAIN_S, self._connect)
            return
        self._num_lines += 1
        self.line = Line(self._world, self, run, self._num_lines)

    def lost(self, why: str) -> None:
        self._world.note(f"gateway {self.number} loses its coordinator: {why}")
        line, self.line = self.line, None
        self.session.disconnected()
        if line is not None and line.alive:
            line.cut()
        self._world.timeline.call_at(self._world.now_s + self._world.rng.uniform(0.001, _AGAIN_S), self._connect)

    def _look(self) -> None:
        if self.dead:
            return
        if self.session.is_silent(self._world.now_s):
            self.lost("it is silent")
        assert not self.session.given_up(self._world.now_s), "no coordinator for too long"
        self._world.timeline.call_at(self._world.now_s + _LOOK_S, self._look)

    def welcomed(self, line: Line, epoch: int) -> None:
        self.session.heard_s = self._world.now_s
        before = self.session.epoch
        to_send = self.session.welcomed(epoch)
        if to_send is None:
            self._world.seen["a gateway refused an old leader"] += 1
            self.lost(f"epoch {epoch} after {before}")
            return
        assert epoch >= before, f"gateway {self.number} believes epoch {epoch} after {before}"
        for message in to_send:
            self._world.seen["resumed"] += isinstance(message, Resumption)
            line.send(message)

    def receive(self, line: Line, items: list[ForGateway]) -> None:
        self.session.heard_s = self._world.now_s
        for item in items:
            if not self.session.welcome and not isinstance(item, Failure):
                return
            if isinstance(item, Count):
                self._world.count(item)
                self._send(("counted", item.id))
            elif isinstance(item, Failure):
                one = self.session.close(item.request_id)
                if one is not None:
                    self._world.failed(one.reader, item.error)
            else:
                self._take(line, item)

    def _take(self, line: Line, event: TokenEvent) -> None:
        assert line.run.epoch == self.session.epoch, "a token of a coordinator that is not believed"
        taken, one = self.session.take(event)
        if taken is Taken.GAP:
            self.lost("a token is missing")
        elif taken is Taken.OTHER:
            raise AssertionError(f"{event.request_id}: a token was changed")
        elif taken is Taken.NEW and one is not None:
            self._world.token(one.reader, event)
