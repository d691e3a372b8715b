"""A gateway's connection to the coordinator: requests out, tokens in; survives the coordinator.

Runs on the gateway's event loop. Every open request is kept here with the tokens that came, so that a coordinator that
knows nothing of it takes it up from there:

| the coordinator is lost when | then |
|---|---|
| the connection ends | it is connected again, to the coordinator that answers at the same address |
| nothing is heard for `_SILENCE_S` | the same |
| it skips a token, or its epoch is below one seen before | the same |
| none has answered for `_AWAY_S` | open requests fail |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

import zmq

from tripool.core import Request, TokenEvent
from tripool.errors import TripoolError
from tripool.fabric.channel import Line, identity_of
from tripool.fabric.gateway_wire import (
    CancelRequest,
    Charge,
    Events,
    Failed,
    GatewayHello,
    GatewayWelcome,
    ModelStatus,
    Query,
    QueryResult,
    Resume,
    Status,
    Submit,
    ToGateway,
    read_to_gateway,
)
from tripool.messages import PROTOCOL, WorkerId
from tripool.router.held import Held, HeldChoice
from tripool.tenants import Tenant
from tripool.token_stream import TokenStream

_LOG = logging.getLogger("tripool.gateway")
_LOOK_S = 0.25
_SILENCE_S = 2.5
"""Longest silence of a coordinator that has welcomed this gateway; it speaks several times a second."""
_AWAY_S = 30.0
_QUERY_S = 10.0


class NoCoordinator(TripoolError, status=503, code="no_coordinator", retry_after_s=1.0):
    """The process that admits and places requests is away, and none has taken its place in time."""

    def __init__(self, message: str = "no coordinator has answered", *, hint: str = "try again; see the log") -> None:
        super().__init__(message, hint=hint)


class _Choice:
    __slots__ = ("done", "num_accepted", "num_drafted", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.done = False
        self.num_drafted = self.num_accepted = 0


class _Open:
    """One open request."""

    __slots__ = ("choices", "choices_left", "model", "num_cached", "request", "since_s", "stream", "tenant")

    def __init__(self, model: str, request: Request, tenant: Tenant, stream: TokenStream, now_s: float) -> None:
        self.model, self.request, self.tenant, self.stream, self.since_s = model, request, tenant, stream, now_s
        self.choices = [_Choice() for _ in range(request.params.n)]
        self.choices_left = request.params.n
        self.num_cached: int | None = None

    def take(self, event: TokenEvent) -> bool | None:
        """Whether it is new; None: tokens before it are missing."""
        choice = self.choices[event.choice]
        if event.index != len(choice.tokens):
            return None if event.index > len(choice.tokens) else False
        choice.tokens.append(event.token_id)
        choice.num_drafted, choice.num_accepted = event.num_draft_tokens, event.num_accepted_draft_tokens
        self.num_cached = event.num_cached_tokens
        if event.finish_reason is not None:
            choice.done = True
            self.choices_left -= 1
        return True

    def resume(self) -> Resume:
        had = [HeldChoice(tuple(c.tokens), c.done, c.num_drafted, c.num_accepted) for c in self.choices]
        return Resume(self.model, self.request, self.tenant, Held(tuple(had), self.num_cached))


class CoordinatorLink:
    """`start` it on the event loop that serves HTTP."""

    def __init__(self, address: str, gateway: WorkerId, *, on_welcome: Callable[[], object] = lambda: None) -> None:
        self._address, self._gateway, self._on_welcome = address, gateway, on_welcome
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._line: Line[ToGateway] | None = None
        self._num_lines = 0
        self.epoch = 0
        """The highest of any coordinator that has welcomed this gateway."""
        self.welcome = False
        self.models: dict[str, ModelStatus] = {}
        """As the coordinator said last."""
        self._heard_s = 0.0
        self._open: dict[str, _Open] = {}
        self._unsent: list[Submit] = []
        """Came while there was no coordinator."""
        self._queries: dict[int, tuple[Query, asyncio.Future[bytes]]] = {}
        self._numbers = count(1)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        if self._loop is None:
            self._loop, self._context = asyncio.get_running_loop(), zmq.Context()
            self._heard_s = self._loop.time()
            self._connect()
            self._look()

    def close(self, error: TripoolError) -> None:
        """End every stream, and the connection."""
        self._fail(list(self._open.values()), error)
        if self._loop is not None and self._context is not None:
            self._disconnect()
            if self._timer is not None:
                self._timer.cancel()
            self._context.term()
            self._loop = self._context = None

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(self, model: str, requests: Sequence[Request], tenant: Tenant, stream: TokenStream) -> None:
        now_s = self._started.time()
        for request in requests:
            self._open[request.id] = _Open(model, request, tenant, stream, now_s)
        submit = Submit(model, tuple(requests), tenant)
        if self.welcome:
            self._send(submit)
        else:
            self._unsent.append(submit)

    def cancel(self, request_id: str) -> None:
        one = self._open.pop(request_id, None)
        if one is not None:
            one.stream.cancelled(request_id)
            self._send(CancelRequest(request_id))

    def charge(self, tenant: Tenant, num_bytes: int) -> None:
        self._send(Charge(tenant, num_bytes))

    async def ask(
        self, what: Literal["enter", "explain", "pools"], *, tenant: Tenant | None = None, request_id: str = ""
    ) -> bytes:
        """The answer as JSON. Raises the coordinator's error, or NoCoordinator if none answers in time."""
        query = Query(next(self._numbers), what, tenant, request_id)
        answer: asyncio.Future[bytes] = self._started.create_future()
        self._queries[query.number] = query, answer
        self._send(query)
        try:
            async with asyncio.timeout(_QUERY_S):
                return await answer
        except TimeoutError:
            raise NoCoordinator from None
        finally:
            del self._queries[query.number]

    @property
    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise NoCoordinator("the gateway is shut down")
        return self._loop

    def _send(self, message: Submit | Resume | CancelRequest | Charge | Query) -> None:
        if self.welcome and self._line is not None:
            self._line.send(message)
            self._sent()

    # ---- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        assert self._context is not None
        self._num_lines += 1
        identity = f"{identity_of(self._gateway)}{self._num_lines}"
        self._line = Line(self._context, self._address, identity, read_to_gateway)
        self._started.add_reader(self._line.fileno, self._receive)
        self._started.add_reader(self._line.monitor, self._look_broken)
        self._line.send(GatewayHello(PROTOCOL, self._gateway))
        self._sent()

    def _disconnect(self) -> None:
        line, self._line, self.welcome = self._line, None, False
        if line is not None:
            self._started.remove_reader(line.fileno)
            self._started.remove_reader(line.monitor)
            line.close()

    def _lose(self, why: str) -> None:
        _LOG.warning(
            "coordinator lost", extra={"reason": why, "open": len(self._open), "coordinator_epoch": self.epoch}
        )
        self._disconnect()
        self._connect()

    def _look_broken(self) -> None:
        if self._line is not None and self._line.broken:
            self._lose("the connection ended")

    def _look(self) -> None:
        """Looks at deadlines."""
        loop = self._started
        silent_s = loop.time() - self._heard_s
        self._look_broken()
        if self.welcome and silent_s > _SILENCE_S:
            self._lose(f"silent for {silent_s:.1f} s")
        if not self.welcome and silent_s > _AWAY_S:
            late_s = loop.time() - _AWAY_S
            self._fail([one for one in self._open.values() if one.since_s < late_s], NoCoordinator())
        self._timer = loop.call_later(_LOOK_S, self._look)

    def _sent(self) -> None:
        """Sending may have used up the sign that there is something to receive."""
        if self._line is not None and self._line.waiting:
            self._started.call_soon(self._receive)

    def _receive(self) -> None:
        self._look_broken()  # ZeroMQ may have connected it again by itself
        line = self._line
        if line is None:
            return
        for message in line.receive():
            self._heard_s = self._started.time()
            if isinstance(message, GatewayWelcome):
                self._welcomed(message.epoch)
            elif not self.welcome:
                continue  # no coordinator of ours
            elif isinstance(message, Events):
                self._events(message.events)
            elif isinstance(message, Status):
                self.models = {model.name: model for model in message.models}
            elif isinstance(message, Failed):
                one = self._open.pop(message.request_id, None)
                if one is not None:
                    one.stream.fail(message.error.error())
            elif message.number in self._queries:
                self._answered(message)
            if line is not self._line:
                return  # lost, and closed

    def _welcomed(self, epoch: int) -> None:
        if epoch < self.epoch:
            self._lose(f"epoch {epoch} after {self.epoch}")
            return
        assert self._line is not None
        if self.epoch:
            _LOG.info("coordinator found", extra={"coordinator_epoch": epoch, "open": len(self._open)})
        self.epoch, self.welcome = epoch, True
        unsent, self._unsent = self._unsent, []
        fresh = {request.id for submit in unsent for request in submit.requests}
        for one in self._open.values():
            if one.request.id not in fresh:
                self._line.send(one.resume())
        for submit in unsent:
            if all(request.id in self._open for request in submit.requests):  # else its client has gone
                self._line.send(submit)
        for query, _ in self._queries.values():
            self._line.send(query)
        self._sent()
        self._on_welcome()

    def _events(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            one = self._open.get(event.request_id)
            if one is None:
                continue  # cancelled meanwhile
            new = one.take(event)
            if new is None:
                self._lose("a token is missing")
                return
            if not new:
                continue
            if not one.choices_left:
                del self._open[event.request_id]
            if not one.stream.put(event):
                self._started.call_soon(self._give_up, one.stream)

    def _answered(self, result: QueryResult) -> None:
        _, answer = self._queries[result.number]
        if answer.done():
            return
        if result.error is not None:
            answer.set_exception(result.error.error())
        else:
            answer.set_result(result.body)

    def _give_up(self, stream: TokenStream) -> None:
        """Compute nothing more for a client that does not read; its stream raises the reason when it is read."""
        for request_id in tuple(stream.choices_left):
            if self._open.pop(request_id, None) is not None:
                self._send(CancelRequest(request_id))

    def _fail(self, failing: Iterable[_Open], error: TripoolError) -> None:
        for one in failing:
            if self._open.pop(one.request.id, None) is not None:
                # The end overtakes what was not read yet: a slow reader must not delay it.
                one.stream.fail(error, at_once=True)
                self._send(CancelRequest(one.request.id))
