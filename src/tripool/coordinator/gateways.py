"""The coordinator's connections to gateways: requests in, tokens and failures out, each to the gateway that asked.

Runs on the coordinator's event loop. Tokens of one turn of the loop leave as one message per gateway. A gateway whose
connection has ended serves its clients no more: its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from tripool.coordinator.pools import Pools
from tripool.core import TokenEvent
from tripool.errors import InvalidRequest, ModelNotFound, TripoolError
from tripool.fabric.channel import Switchboard
from tripool.fabric.gateway_wire import (
    AdmissionStatus,
    CancelRequest,
    Charge,
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
    Resume,
    Status,
    Submit,
    ToGateway,
    read_from_gateway,
)
from tripool.messages import PROTOCOL, WireError, WorkerId
from tripool.router.fair_queue import MAX_LABELS, fairness, waiting_by_tenant

_LOG = logging.getLogger("tripool.coordinator")
_STATUS_S = 0.25
_LOG_S, _SIGN_S = 0.02, 0.1
"""Between two records of the log; and longest silence of the log without news."""


@dataclass(slots=True, eq=False)
class _Session:
    gateway: WorkerId
    line: bytes
    events: list[TokenEvent] = field(default_factory=list)
    """Not sent yet."""
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Owner:
    """Of one open request."""

    session: _Session
    model: str
    choices_left: int
    """Whose last token was not sent yet. The service may be done with all of them by then: it decides about all tokens
    of a step before the first of them is sent."""


@dataclass(slots=True)
class _Opened:
    loop: asyncio.AbstractEventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    switchboard: Switchboard[FromGateway]
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Gateways:
    def __init__(self, pools: Pools, address: str, *, on_change: Callable[[], object] = lambda: None) -> None:
        """`on_change`: a gateway has come or gone."""
        self._pools, self._address, self._on_change = pools, address, on_change
        self._sessions: dict[bytes, _Session] = {}
        """By the identity of their lines."""
        self._owners: dict[str, _Owner] = {}
        self._unsent: list[_Session] = []
        self._standbys: set[bytes] = set()
        """By the identity of their lines."""
        self._log_s = 0.0
        self._opened: _Opened | None = None

    def __len__(self) -> int:
        """Gateways that are connected."""
        return len(self._sessions)

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
        owner = self._owners.get(event.request_id)
        if owner is None or self._opened is None:
            return
        session = owner.session
        if not session.events:
            if not self._unsent:
                self._opened.loop.call_soon(self._flush)
            self._unsent.append(session)
        session.events.append(event)
        if event.finish_reason is not None:
            owner.choices_left -= 1
            if not owner.choices_left:
                self._forget(event.request_id)

    def fail(self, request_id: str, error: TripoolError) -> None:
        owner = self._owners.get(request_id)
        if owner is not None:
            self._flush()  # its tokens go first
            self._forget(request_id)
            self._send(owner.session, Failed(request_id, WireError.of(error)))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for session in unsent:
            events, session.events = session.events, []
            if events:
                self._send(session, Events(tuple(events)))

    def _send(self, session: _Session, message: ToGateway) -> None:
        opened = self._opened
        if opened is None or session.line not in self._sessions:
            return
        if not opened.switchboard.send(session.line, message):
            opened.loop.call_soon(self._gone, session)  # this may be amid what a service decided
        elif opened.switchboard.waiting:  # sending may have used up the sign that there is something to receive
            opened.loop.call_soon(self._receive)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).session.requests.discard(request_id)

    # ---- what the gateways send -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        opened = self._opened
        if opened is None:
            return
        for line, message in opened.switchboard.receive():
            session = self._sessions.get(line)
            if isinstance(message, GatewayHello):
                self._hello(line, message)
            elif isinstance(message, Follow):
                self._follow(opened, line, message)
            elif session is not None:  # else of an earlier session: its gateway will notice, and say hello
                self._take(session, message)

    def _hello(self, line: bytes, hello: GatewayHello) -> None:
        if hello.protocol != PROTOCOL:
            return
        for session in list(self._sessions.values()):
            if session.gateway.name == hello.gateway.name:
                self._gone(session)
        session = self._sessions[line] = _Session(hello.gateway, line)
        self._send(session, GatewayWelcome(self._pools.epoch))
        self._send(session, self._status())
        _LOG.info("gateway joined", extra={"gateway": hello.gateway.name, "gateway_epoch": hello.gateway.epoch})
        self._on_change()

    def _take(self, session: _Session, message: FromGateway) -> None:
        pools, now_s = self._pools, self._pools.clock()
        match message:
            case Submit():
                self._submit(session, message, now_s)
            case Resume():
                service = pools.services.get(message.model)
                if service is not None and message.request.id not in self._owners:
                    num_done = sum(choice.done for choice in message.held.choices)
                    self._own(session, message.request.id, message.model, message.request.params.n - num_done)
                    pools.carry_out(service.resume(message.request, message.tenant, message.held, now_s))
            case CancelRequest():
                owner = self._owners.get(message.request_id)
                if owner is not None and owner.session is session:
                    self._cancel(message.request_id)
            case Charge():
                pools.rate_limiter.read(message.tenant, message.num_bytes, now_s)
            case Query():
                self._send(session, self._answer(message, now_s))

    def _submit(self, session: _Session, message: Submit, now_s: float) -> None:
        service, error = self._pools.services.get(message.model), ""
        if any(request.id in self._owners for request in message.requests):
            error = "a request id is in use"
        if service is None or error:
            refusal = InvalidRequest(error) if error else ModelNotFound(f"there is no model '{message.model}'")
            for request in message.requests:
                self._send(session, Failed(request.id, WireError.of(refusal)))
            return
        for request in message.requests:
            self._own(session, request.id, message.model, request.params.n)
        self._pools.carry_out(service.submit(message.requests, message.tenant, now_s))

    def _own(self, session: _Session, request_id: str, model: str, num_choices: int) -> None:
        self._owners[request_id] = _Owner(session, model, num_choices)
        session.requests.add(request_id)

    def _cancel(self, request_id: str) -> None:
        model = self._owners[request_id].model
        self._forget(request_id)
        self._pools.carry_out(self._pools.services[model].cancel(request_id, self._pools.clock()))

    def _gone(self, session: _Session) -> None:
        if self._sessions.get(session.line) is not session:
            return
        del self._sessions[session.line]
        _LOG.warning("gateway lost", extra={"gateway": session.gateway.name, "cancelled": len(session.requests)})
        for request_id in list(session.requests):
            self._cancel(request_id)
        self._on_change()

    def _answer(self, query: Query, now_s: float) -> QueryResult:
        body: object = None
        if query.what == "enter" and query.tenant is not None:
            service = next(iter(self._pools.services.values()))  # a tenant's rates apply to all models together
            error = service.admission.enter(query.tenant, now_s)
            if error is not None:
                return QueryResult(query.number, error=WireError.of(error))
        elif query.what == "explain":
            told = (service.explain(query.request_id, now_s) for service in self._pools.services.values())
            body = next(filter(None, told), {})
        elif query.what == "pools":
            body = self._pools.describe() | {"gateways": sorted(str(s.gateway) for s in self._sessions.values())}
            body["standbys"] = len(self._standbys)
        return QueryResult(query.number, msgspec.json.encode(body))

    # ---- status -----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Also finds gateways that are gone."""
        opened = self._opened
        if opened is not None:
            status = self._status()
            for session in list(self._sessions.values()):
                self._send(session, status)
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
        now_s, models = self._pools.clock(), []
        for name, service in self._pools.services.items():
            queue = service.admission.queue
            waiting, errors = waiting_by_tenant(queue, MAX_LABELS), service.errors
            admission = AdmissionStatus(waiting, fairness(queue, now_s), tuple(errors.counts), errors.sum)
            slots, instances = service.room().slots or 0, tuple(sorted(service.instances()))
            stats = service.stats(now_s)
            models.append(ModelStatus(name, service.context_tokens, slots, stats, admission, instances))
        return Status(tuple(models))
