"""The coordinator's connections to gateways: requests in, tokens and failures out, each to the gateway that asked.

Runs on the coordinator's event loop. Tokens of one turn of the loop leave as one message per gateway. Whose request is
whose is decided in `router/sessions.py`; here messages are translated into its calls, and back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from tripool.coordinator.pools import Pools
from tripool.core import TokenEvent
from tripool.errors import TripoolError
from tripool.fabric.channel import Switchboard
from tripool.fabric.gateway_wire import (
    AdmissionStatus,
    Ask,
    CancelRequest,
    Charge,
    Counted,
    Events,
    Failed,
    Follow,
    FromGateway,
    GatewayHello,
    GatewayWelcome,
    Leads,
    Log,
    ModelStatus,
    Query,
    QueryResult,
    Question,
    Replies,
    Reply,
    Resume,
    Status,
    Stopped,
    Submit,
    ToGateway,
    Usages,
    read_from_gateway,
)
from tripool.messages import PROTOCOL, WireError, WorkerId
from tripool.router.fair_queue import MAX_LABELS, fairness, waiting_by_tenant
from tripool.router.kept_types import Count
from tripool.router.questions import Gathered, Questions
from tripool.router.sessions import Failure, ForGateway

_LOG = logging.getLogger("tripool.coordinator")
_STATUS_S = 0.25
_LOG_S, _SIGN_S = 0.02, 0.1
"""Between two records of the log; and longest silence of the log without news."""
_AT_ONCE = 4096
"""Tokens in one message: an answer that is read again comes in parts."""


@dataclass(slots=True)
class _Opened:
    loop: asyncio.AbstractEventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    switchboard: Switchboard[FromGateway]
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Gateways:
    def __init__(self, pools: Pools, address: str, *, on_change: Callable[[], object] = lambda: None) -> None:
        """`on_change`: a gateway has come or gone."""
        self._pools, self._sessions, self._address, self._on_change = pools, pools.sessions, address, on_change
        self._gateways: dict[bytes, WorkerId] = {}
        """By the identity of their lines, as are the standbys."""
        self._standbys: set[bytes] = set()
        self._questions = Questions()
        self._flushes = False
        """Whether what is unsent leaves at the end of this turn of the loop."""
        self._log_s = 0.0
        self._opened: _Opened | None = None

    def __len__(self) -> int:
        """Gateways that are connected."""
        return len(self._gateways)

    @property
    def num_standbys(self) -> int:
        return len(self._standbys)

    def start(self) -> None:
        loop, context = asyncio.get_running_loop(), zmq.Context[zmq.Socket[bytes]]()
        self._opened = _Opened(loop, context, Switchboard(context, read_from_gateway, self._address))
        loop.add_reader(self._opened.switchboard.fileno, self._receive)
        self._tell()
        self._write_log()

    def close(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.loop.remove_reader(opened.switchboard.fileno)
            for timer in opened.timers:
                timer.cancel()
            opened.switchboard.close()
            opened.context.term()

    # ---- what the pools bring ---------------------------------------------------------------------------------------

    def emit(self, event: TokenEvent) -> None:
        self._sessions.emit(event)
        if not self._flushes:
            self._flush_soon()

    def fail(self, request_id: str, error: TripoolError) -> None:
        self._sessions.fail(request_id, error)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushes and self._opened is not None:
            self._flushes = True
            self._opened.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._sessions.unsettled:  # this was amid what a service decided
            self._pools.carry_out(self._sessions.settle(self._pools.clock()))
        unsent, self._sessions.unsent = self._sessions.unsent, []
        for session in unsent:
            items, session.out = session.out, []
            for message in _messages(items):
                self._send(session.line, message)

    def _send(self, line: bytes, message: ToGateway) -> None:
        opened = self._opened
        if opened is None or line not in self._gateways:
            return
        if not opened.switchboard.send(line, message):
            opened.loop.call_soon(self._gone, line)  # this may be amid what a service decided
        elif opened.switchboard.waiting:  # sending may have used up the sign that there is something to receive
            opened.loop.call_soon(self._receive)

    # ---- what the gateways send -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        opened = self._opened
        if opened is None or not self._pools.may_decide():
            return
        for line, message in opened.switchboard.receive():
            if isinstance(message, GatewayHello):
                self._hello(line, message)
            elif isinstance(message, Follow):
                self._follow(opened, line, message)
            elif line in self._gateways:  # else of an earlier session: its gateway will notice, and say hello
                self._take(line, message)
        if self._sessions.unsent:
            self._flush_soon()

    def _hello(self, line: bytes, hello: GatewayHello) -> None:
        if hello.protocol != PROTOCOL:
            return
        for other, gateway in list(self._gateways.items()):
            if gateway.name == hello.gateway.name:
                self._gone(other)
        self._gateways[line] = hello.gateway
        self._sessions.joined(line)
        self._send(line, GatewayWelcome(self._pools.epoch))
        self._send(line, self._status())
        _LOG.info("gateway joined", extra={"gateway": hello.gateway.name, "gateway_epoch": hello.gateway.epoch})
        self._on_change()

    def _take(self, line: bytes, message: FromGateway) -> None:
        pools, sessions, now_s = self._pools, self._sessions, self._pools.clock()
        match message:
            case Submit():
                keyed = message.keyed
                pools.carry_out(sessions.submit(line, message.model, message.requests, message.tenant, now_s, keyed))
            case Resume():
                head = (line, message.model, message.request, message.tenant, message.held, now_s)
                pools.carry_out(sessions.resume(*head, message.keyed, message.place))
            case CancelRequest():
                pools.carry_out(sessions.cancel(line, message.request_id, now_s))
            case Stopped():
                pools.carry_out(sessions.stopped(line, message.request_id, message.lengths, now_s))
            case Counted():
                sessions.counted(message.id)
            case Charge():
                pools.rate_limiter.read(message.tenant, message.num_bytes, now_s)
            case Query():
                self._send(line, self._answer(message, now_s))
            case Ask():
                self._ask(line, message, now_s)
            case Reply():
                self._gathered(self._questions.reply(line, message.number, message.body))

    def _gone(self, line: bytes) -> None:
        gateway = self._gateways.pop(line, None)
        if gateway is None:
            return
        _LOG.warning("gateway lost", extra={"gateway": gateway.name, "requests": self._sessions.num_requests(line)})
        self._pools.carry_out(self._sessions.gone(line, self._pools.clock()))
        self._gathered(self._questions.gone(line))
        self._on_change()

    def _answer(self, query: Query, now_s: float) -> QueryResult:
        try:
            return QueryResult(query.number, msgspec.json.encode(self._asked(query, now_s)))
        except TripoolError as error:
            return QueryResult(query.number, error=WireError.of(error))

    def _asked(self, query: Query, now_s: float) -> object:
        """Raises what the gateway's client is to see."""
        pools, tenant = self._pools, query.tenant
        if query.what == "enter" and tenant is not None:
            service = next(iter(pools.services.values()))  # a tenant's rates apply to all models together
            error = service.admission.enter(tenant, now_s)
            if error is not None:
                raise error
        elif query.what == "repeats" and tenant is not None:
            return self._sessions.kept.repeats(tenant.name, query.name)
        elif query.what == "claim" and tenant is not None and query.keyed is not None:
            return self._sessions.kept.claim(query.keyed, tenant, now_s)
        elif query.what == "explain":
            request_id = self._sessions.canonical(query.name)
            told = (service.explain(request_id, now_s) for service in pools.services.values())
            return next(filter(None, told), {})
        elif query.what in ("drain", "undrain"):
            pools.draining = query.what == "drain"
            for line in self._gateways:
                self._send(line, self._status())
        elif query.what == "pools":
            gateways = {"gateways": sorted(map(str, self._gateways.values())), "standbys": len(self._standbys)}
            return pools.describe() | gateways | {"kept_answers": len(self._sessions.kept)}
        return None

    def _ask(self, line: bytes, ask: Ask, now_s: float) -> None:
        others = [other for other in self._gateways if other != line]
        number, gathered = self._questions.ask(line, ask.number, others, now_s)
        for other in others:
            self._send(other, Question(number, ask.what, ask.body))
        self._gathered(gathered)

    def _gathered(self, gathered: Iterable[Gathered]) -> None:
        for line, number, bodies in gathered:
            self._send(line, Replies(number, bodies))

    # ---- status -----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Also finds gateways that are gone."""
        opened = self._opened
        if opened is not None and self._pools.may_decide():
            status, now_s = self._status(), self._pools.clock()
            for line in list(self._gateways):
                self._send(line, status)
            self._gathered(self._questions.tick(now_s))
            self._pools.carry_out(self._sessions.tick(now_s))
            self._flush_soon()
            self._later(opened, _STATUS_S, self._tell)

    def _later(self, opened: _Opened, delay_s: float, call: Callable[[], None]) -> None:
        now_s = opened.loop.time()
        opened.timers = [timer for timer in opened.timers if timer.when() > now_s and not timer.cancelled()]
        opened.timers.append(opened.loop.call_later(delay_s, call))

    # ---- standbys ---------------------------------------------------------------------------------------------------

    def _follow(self, opened: _Opened, line: bytes, follow: Follow) -> None:
        if follow.protocol == PROTOCOL and line not in self._standbys:
            self._standbys.add(line)
            opened.switchboard.send(line, Leads(os.getpid(), self._pools.epoch))
            opened.switchboard.send(line, Log(self._pools.record(everything=True)))
            _LOG.info("standby joined", extra={"standby": str(follow.standby)})

    def _write_log(self) -> None:
        """No token waits for it: a living gateway knows its own requests, and a takeover asks it."""
        opened = self._opened
        if opened is None:
            return
        record, now_s = self._pools.record(), opened.loop.time()
        if self._standbys and (record or now_s >= self._log_s + _SIGN_S):
            self._log_s = now_s
            for line in list(self._standbys):
                if not opened.switchboard.send(line, Log(record)):
                    self._standbys.discard(line)
        self._later(opened, _LOG_S, self._write_log)

    def _status(self) -> Status:
        now_s, models = self._pools.clock(), list[ModelStatus]()
        for name, service in self._pools.services.items():
            queue = service.admission.queue
            waiting, errors = waiting_by_tenant(queue, MAX_LABELS), service.errors
            admission = AdmissionStatus(waiting, fairness(queue, now_s), tuple(errors.counts), errors.sum)
            slots, instances = service.room().slots or 0, tuple(sorted(service.instances()))
            stats = service.stats(now_s)
            models.append(ModelStatus(name, service.context_tokens, slots, stats, admission, instances))
        return Status(tuple(models), self._pools.draining)


def _messages(items: list[ForGateway]) -> Iterable[ToGateway]:
    """Tokens that follow each other together."""
    events: list[Any] = []
    for item in items:
        if isinstance(item, TokenEvent):
            events.append(item)
            if len(events) < _AT_ONCE:
                continue
        if events:
            yield Events(tuple(events))
            events = []
        if isinstance(item, Failure):
            yield Failed(item.request_id, WireError.of(item.error))
        elif isinstance(item, Count):
            yield Usages((item,))
    if events:
        yield Events(tuple(events))
