"""A gateway's connection to the coordinator: requests out, tokens in; survives the coordinator.

Runs on the gateway's event loop. What is believed, kept and sent again is decided in `router/gateway_session.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count

import zmq

from tripool.core import Request, TokenEvent
from tripool.errors import TripoolError
from tripool.fabric.channel import Line, identity_of
from tripool.fabric.gateway_wire import (
    Ask,
    CancelRequest,
    Charge,
    Counted,
    Events,
    Failed,
    FromGateway,
    GatewayHello,
    GatewayWelcome,
    ModelStatus,
    Query,
    QueryKind,
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
    read_to_gateway,
)
from tripool.messages import PROTOCOL, WorkerId
from tripool.router.gateway_session import GatewaySession, OpenRequest, Resumption, Submission
from tripool.router.held import Taken
from tripool.router.kept_types import AnswerChanged, Count, Keyed
from tripool.router.questions import ANSWER_S
from tripool.tenants import Tenant
from tripool.token_stream import TokenStream

_LOG = logging.getLogger("tripool.gateway")
_LOOK_S = 0.25
_QUERY_S = 10.0
_ASK_S = ANSWER_S + 1.0

OnCount = Callable[[Count, Callable[[], object]], object]
"""Logs usage, and calls the second argument, from any thread, once it is on disk."""


class NoCoordinator(TripoolError, status=503, code="no_coordinator", retry_after_s=1.0):
    """The process that admits and places requests is away, and none has taken its place in time."""

    def __init__(self, message: str = "no coordinator has answered", *, hint: str = "try again; see the log") -> None:
        super().__init__(message, hint=hint)


class CoordinatorLink:
    """`start` it on the event loop that serves HTTP."""

    def __init__(
        self, address: str, gateway: WorkerId, *, on_welcome: Callable[[], object] = lambda: None,
        on_count: OnCount = lambda count, done: done(),
    ) -> None:  # fmt: skip
        self._address, self._gateway, self._on_welcome, self._on_count = address, gateway, on_welcome, on_count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._line: Line[ToGateway] | None = None
        self._num_lines = 0
        self._session: GatewaySession[TokenStream] = GatewaySession(0.0)
        self.models: dict[str, ModelStatus] = {}
        """As the coordinator said last."""
        self.draining = False
        self.answers: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}
        """What this gateway answers to others, by the kind of question."""
        self._answering: set[asyncio.Task[None]] = set()
        self._queries: dict[int, tuple[Query | Ask, asyncio.Future[QueryResult | Replies]]] = {}
        self._numbers = count(1)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return len(self._session.open)

    @property
    def welcome(self) -> bool:
        return self._session.welcome

    @property
    def epoch(self) -> int:
        return self._session.epoch

    def start(self) -> None:
        if self._loop is None:
            self._loop, self._context = asyncio.get_running_loop(), zmq.Context()
            self._session.heard_s = self._loop.time()
            self._connect()
            self._look()

    def close(self, error: TripoolError) -> None:
        """End every stream, and the connection."""
        self._fail(list(self._session.open.values()), error)
        if self._loop is not None and self._context is not None:
            self._disconnect()
            if self._timer is not None:
                self._timer.cancel()
            for task in self._answering:
                task.cancel()
            self._context.term()
            self._loop = self._context = None

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, model: str, requests: Sequence[Request], tenant: Tenant, stream: TokenStream, keyed: Keyed | None = None
    ) -> None:
        submission = Submission(model, tuple(requests), tenant, keyed)
        if self._session.submit(submission, stream, self._started.time()):
            self._send(Submit(*submission))

    def cancel(self, request_id: str) -> None:
        one = self._session.close(request_id)
        if one is not None:
            one.reader.cancelled(request_id)
            self._send(CancelRequest(request_id))

    def stopped(self, request_id: str, lengths: tuple[int, ...]) -> None:
        """Of a request with an idempotency key: a stop string was found."""
        one = self._session.close(request_id)
        if one is not None:
            one.reader.cancelled(request_id)
            self._send(Stopped(request_id, lengths))

    def charge(self, tenant: Tenant, num_bytes: int) -> None:
        self._send(Charge(tenant, num_bytes))

    async def ask(
        self, what: QueryKind, *, tenant: Tenant | None = None, name: str = "", keyed: Keyed | None = None
    ) -> bytes:
        """The answer as JSON. Raises the coordinator's error, or NoCoordinator if none answers in time."""
        result = await self._asked(Query(next(self._numbers), what, tenant, name, keyed), _QUERY_S)
        assert isinstance(result, QueryResult)
        return result.body

    async def ask_others(self, what: str, body: bytes = b"") -> tuple[bytes, ...]:
        """What all other gateways answer; nothing from those that do not in time. Raises NoCoordinator."""
        result = await self._asked(Ask(next(self._numbers), what, body), _ASK_S)
        assert isinstance(result, Replies)
        return result.bodies

    async def _asked(self, query: Query | Ask, timeout_s: float) -> QueryResult | Replies:
        answer: asyncio.Future[QueryResult | Replies] = self._started.create_future()
        self._queries[query.number] = query, answer
        self._send(query)
        try:
            async with asyncio.timeout(timeout_s):
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

    def _send(self, message: FromGateway) -> None:
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
        line, self._line = self._line, None
        self._session.disconnected()
        if line is not None:
            self._started.remove_reader(line.fileno)
            self._started.remove_reader(line.monitor)
            line.close()

    def _lose(self, why: str) -> None:
        _LOG.warning("coordinator lost", extra={"reason": why, "open": self.num_open, "coordinator_epoch": self.epoch})
        self._disconnect()
        self._connect()

    def _look_broken(self) -> None:
        if self._line is not None and self._line.broken:
            self._lose("the connection ended")

    def _look(self) -> None:
        """Looks at deadlines."""
        loop, session = self._started, self._session
        self._look_broken()
        if session.is_silent(loop.time()):
            self._lose(f"silent for {loop.time() - session.heard_s:.1f} s")
        self._fail(session.given_up(loop.time()), NoCoordinator())
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
            self._session.heard_s = self._started.time()
            if isinstance(message, GatewayWelcome):
                self._welcomed(message.epoch)
            elif not self.welcome:
                continue  # no coordinator of ours
            elif isinstance(message, Events):
                self._events(message.events)
            else:
                self._take(message)
            if line is not self._line:
                return  # lost, and closed

    def _take(self, message: ToGateway) -> None:
        match message:
            case Status():
                self.models = {model.name: model for model in message.models}
                self.draining = message.draining
            case Failed():
                one = self._session.close(message.request_id)
                if one is not None:
                    one.reader.fail(message.error.error())
            case QueryResult() | Replies():
                self._answered(message)
            case Usages():
                for count in message.counts:
                    self._count(count)
            case Question():
                self._answer(message)

    def _welcomed(self, epoch: int) -> None:
        known, before = bool(self.epoch), self.epoch
        to_send = self._session.welcomed(epoch)
        if to_send is None:
            self._lose(f"epoch {epoch} after {before}")
            return
        assert self._line is not None
        if known:
            _LOG.info("coordinator found", extra={"coordinator_epoch": epoch, "open": self.num_open})
        for item in to_send:
            self._line.send(Resume(*item) if isinstance(item, Resumption) else Submit(*item))
        for query, _ in self._queries.values():
            self._line.send(query)
        self._sent()
        self._on_welcome()

    def _events(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            taken, one = self._session.take(event)
            if one is None or taken is Taken.KNOWN:
                continue  # cancelled meanwhile, or there already
            if taken is Taken.GAP:
                self._lose("a token is missing")
                return
            if taken is Taken.OTHER:
                self._fail([one], AnswerChanged("the answer was computed again, and is another one"))
            elif not one.reader.put(event):
                self._started.call_soon(self._give_up, one.reader)

    def _answered(self, result: QueryResult | Replies) -> None:
        _, answer = self._queries.get(result.number, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(result, QueryResult) and result.error is not None:
            answer.set_exception(result.error.error())
        else:
            answer.set_result(result)

    def _give_up(self, stream: TokenStream) -> None:
        """Compute nothing more for a client that does not read; its stream raises the reason when it is read."""
        for request_id in tuple(stream.choices_left):
            if self._session.close(request_id) is not None:
                self._send(CancelRequest(request_id))

    def _fail(self, failing: Iterable[OpenRequest[TokenStream]], error: TripoolError) -> None:
        for one in failing:
            if self._session.close(one.request.id) is not None:
                # The end overtakes what was not read yet: a slow reader must not delay it.
                one.reader.fail(error, at_once=True)
                self._send(CancelRequest(one.request.id))

    # ---- other gateways, and usage ----------------------------------------------------------------------------------

    def _answer(self, question: Question) -> None:
        task = self._started.create_task(self._reply(question))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _reply(self, question: Question) -> None:
        answer, body = self.answers.get(question.what), b""
        if answer is not None:
            try:
                body = await answer(question.body)
            except TripoolError:
                body = b""  # nothing is known of it here
        self._send(Reply(question.number, body))

    def _count(self, count: Count) -> None:
        loop, counted = self._started, Counted(count.id)
        self._on_count(count, lambda: loop.call_soon_threadsafe(self._send, counted))
