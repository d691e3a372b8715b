"""Whether every client got what it must: its turn, each token once, in order, unchanged, and an end. Pure.

Knows requests and what an undisturbed run would answer; of workers only whom the gateway has asked last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tripool.core import FinishReason, Request, TokenEvent
from tripool.errors import TripoolError
from tripool.messages import (
    AnyMessage,
    Cancel,
    KvDescriptor,
    Release,
    StartDecode,
    StartPrefill,
    Tokens,
    TransferReady,
    WorkerId,
)
from tripool.router.admission import AdmissionController
from tripool.simulate.timeline import Timeline
from tripool.simulate.world import Observer
from tripool.tenants import Tenant


@dataclass(slots=True)
class _Client:
    request: Request
    arrived_s: float
    answers: list[tuple[list[int], FinishReason]]
    num_seen: list[int]
    num_open: int
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class Checker(Observer):
    timeline: Timeline
    tenants: dict[str, Tenant]
    may_refuse: bool
    answer: Callable[[Request, int], tuple[list[int], FinishReason]]
    """What an undisturbed run gives for a request and choice."""
    outcomes: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_requests: int = 0
    _open: dict[str, _Client] = field(default_factory=dict)
    _lines: dict[tuple[str, int], deque[str]] = field(default_factory=dict)
    """Waiting requests by tenant and priority, in order of arrival."""
    _num_taken: Counter[str] = field(default_factory=Counter)
    """Requests of each tenant that passed its rate limit at this gateway."""
    opened_s: float = 0.0
    """When clients could connect first, or were cut off last."""
    died_s: float = 0.0
    """When the last coordinator died."""
    _placed: dict[tuple[str, int], tuple[WorkerId, int]] = field(default_factory=dict)
    """The worker last asked for each (request, choice), and as which attempt."""
    _transfers: dict[tuple[str, int], TransferReady] = field(default_factory=dict)
    """What each (request, attempt) was to be decoded from."""
    _offered: dict[tuple[str, int, KvDescriptor], TransferReady] = field(default_factory=dict)
    _released: set[tuple[WorkerId, int]] = field(default_factory=set)
    """Leases that the gateway has ended."""
    _cancelled: set[str] = field(default_factory=set)
    """Requests whose clients left before their end."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    # ---- admission --------------------------------------------------------------------------------------------------

    def turned_away(self) -> None:
        self.seen["turned away by no gateway"] += 1

    def arrived(self, request: Request) -> None:
        self.timeline.note(f"{request.id} arrives")
        count = request.params.n
        answers = [self.answer(request, choice) for choice in range(count)]
        self._open[request.id] = _Client(request, self.timeline.now_s, answers, [0] * count, count)
        self._line(request).append(request.id)
        self._num_taken[request.slo.tenant] += 1
        self.num_requests += 1

    def admitted(self, request_id: str) -> None:
        self.timeline.note(f"{request_id} is admitted")
        client = self._open[request_id]
        line = self._line(client.request)
        assert line[0] == request_id, f"{request_id} overtakes {line[0]}"
        self._decided(client)

    def refused(self, request_id: str, error: TripoolError) -> None:
        """By admission control: only where that may be, with a fitting reason, and before the request was placed."""
        self.timeline.note(f"{request_id} is refused: {error.code}")
        client = self._open[request_id]
        request = client.request
        begun = any(client.num_seen) or any((request.id, choice) in self._placed for choice in range(request.params.n))
        assert not begun, f"{request.id}: refused after it was begun"
        assert self.may_refuse, f"{request.id}: refused although there was room: {error}"
        assert error.status == 429 and (error.retry_after_s or 0) > 0, f"{request.id}: refused without advice"
        promised = error.code != "ttft_unreachable" or request.slo.ttft_ms is not None
        assert promised, f"{request.id}: refused for a promise that it never had"
        self._num_taken[request.slo.tenant] -= error.code == "rate_limited"
        self._decided(client)
        self._end(request.id, error.code)

    def check_admission(self, admission: AdmissionController) -> None:
        now_s = self.timeline.now_s
        admission.check(now_s)
        assert admission.num_waiting == sum(map(len, self._lines.values())), "admission has lost a request"
        for name, number in self._num_taken.items():
            per_minute = self.tenants[name].limits.requests_per_minute or float("inf")
            most = per_minute * (1 + (now_s - self.opened_s) / 60)
            assert number <= most + 1e-6, f"'{name}' got {number} requests through, and may {most:.1f}"
        assert all(request_id in admission for request_id in self._open)

    def _line(self, request: Request) -> deque[str]:
        return self._lines.setdefault((request.slo.tenant, request.slo.priority), deque())

    def _decided(self, client: _Client) -> None:
        """It waits no more."""
        self._line(client.request).remove(client.request.id)
        self.seen["waited for admission"] += self.timeline.now_s > client.arrived_s

    # ---- placement and tokens ---------------------------------------------------------------------------------------

    def sent_to_worker(self, worker_id: WorkerId, message: AnyMessage) -> None:
        match message:
            case StartPrefill():
                for each in message.answered:
                    self._placed[message.request.id, each.choice] = worker_id, message.attempt
            case StartDecode():
                request_id, choice = message.request.id, message.answered.choice
                self._transfers[request_id, message.attempt] = self._offered[request_id, choice, message.descriptor]
                self._placed[request_id, choice] = worker_id, message.attempt
            case Release():
                self._released.add((worker_id, message.lease))
            case Cancel():
                gone = (worker_id, message.attempt)
                client = self._open.get(message.request_id)
                for choice in range(client.request.params.n if client is not None else 0):
                    if self._placed.get((message.request_id, choice)) == gone:
                        del self._placed[message.request_id, choice]

    def lost(self, worker_id: WorkerId) -> None:
        """The gateway has given this worker up."""
        for key in [key for key, (holder, _) in self._placed.items() if holder == worker_id]:
            del self._placed[key]

    def offered(self, message: TransferReady) -> None:
        self._offered[message.request_id, message.choice, message.descriptor] = message

    def leased(self, request_id: str, attempt: int) -> TransferReady | None:
        """The KV of a placement that nothing but a fault may have ended. A cancel by the client ends its lease, and may
        reach the sender before it reaches the receiver."""
        found = self._transfers[request_id, attempt]
        ended = request_id in self._cancelled and (found.worker_id, found.lease) in self._released
        return None if ended else found

    def sent(self, message: Tokens) -> None:
        """Before the ledger drops what it has already: a worker sends each token once."""
        due: dict[tuple[str, int], int] = {}
        for stamped in message.events:
            event = stamped.event
            key = event.request_id, event.choice
            client = self._open.get(event.request_id)
            if client is not None and self._placed.get(key) == (message.worker_id, stamped.attempt):
                seen = due.get(key, client.num_seen[event.choice])
                assert event.index >= seen, f"{_where(event)}: {message.worker_id} sends it twice"
                due[key] = event.index + 1

    def source(self, event: TokenEvent, worker_id: WorkerId, attempt: int) -> None:
        """Before a token that a message brought is counted: whether it comes from the worker that was asked for it."""
        own = self._placed.get((event.request_id, event.choice)) == (worker_id, attempt)
        assert own, f"{event.request_id} choice {event.choice}: a token of attempt {attempt}, which is not its own"

    def token(self, event: TokenEvent) -> None:
        self.timeline.note(f"{event.request_id}.{event.choice}[{event.index}] = {event.token_id}")
        client = self._open.get(event.request_id)
        assert client is not None, f"{event.request_id}: a token for a request that is over"
        tokens, finish = client.answers[event.choice]
        seen = client.num_seen[event.choice]
        assert event.index == seen, f"{_where(event)}: token {seen} was due: one is lost or comes twice"
        assert event.token_id == tokens[seen], f"{_where(event)}: {event.token_id} instead of {tokens[seen]}"
        last = seen + 1 == len(tokens)
        assert event.finish_reason == (finish if last else None), f"{_where(event)}: finish {event.finish_reason}"
        cached = event.num_cached_tokens
        assert client.num_cached_tokens in (None, cached), f"{_where(event)}: the count of cached tokens has changed"
        assert 0 <= cached < len(client.request.prompt_ids), f"{_where(event)}: {cached} cached tokens"
        client.num_cached_tokens = cached
        client.num_seen[event.choice] += 1
        client.num_open -= last
        self.num_tokens += 1
        if not client.num_open:
            self._end(event.request_id, "finished")

    def cancelled(self, request_id: str) -> None:
        self.timeline.note(f"{request_id} is cancelled")
        client = self._open.get(request_id)
        if client is not None:
            if request_id in self._line(client.request):  # in none while there is no coordinator
                self.seen["cancelled before admission"] += 1
                self._decided(client)
            self._cancelled.add(request_id)
            self._end(request_id, "cancelled")

    def failed(self, request_id: str, error: TripoolError) -> None:
        self.timeline.note(f"{request_id} fails: {error.code}")
        assert request_id in self._open, f"{request_id}: failed after its end"
        fine = self.may_refuse and error.code == "overloaded" and not any(self._open[request_id].num_seen)
        assert fine, f"{request_id}: failed although there was capacity: {error}"
        self._end(request_id, error.code)

    def gateway_died(self) -> None:
        """And every client's connection with it."""
        for request_id in self.open_ids:
            self._end(request_id, "gateway died")
        self.seen["waited for admission"] += sum(map(len, self._lines.values()))
        self._lines, self._num_taken, self.opened_s = {}, Counter(), self.timeline.now_s
        self.died_s = self.timeline.now_s

    def coordinator_died(self) -> None:
        """No client notices: what was placed and what waited is so no more, until it is taken up again."""
        self.timeline.note("the coordinator dies")
        self.died_s = self.timeline.now_s
        self.seen["waited for admission"] += sum(map(len, self._lines.values()))
        self._placed, self._lines = {}, {}

    def taken_over(self, requests: list[Request], untold: Counter[str]) -> None:
        """All that is open waits for its turn again, in this order."""
        assert [request.id for request in requests] == list(self._open), "a request is not taken up again"
        self.seen["requests taken over"] += len(requests)
        self.seen["requests taken over with tokens"] += sum(any(one.num_seen) for one in self._open.values())
        self._num_taken -= untold
        for request in requests:
            self._line(request).append(request.id)

    def _end(self, request_id: str, outcome: str) -> None:
        for choice in range(self._open.pop(request_id).request.params.n):
            self._placed.pop((request_id, choice), None)
        self.outcomes[outcome] += 1


def _where(event: TokenEvent) -> str:
    return f"{event.request_id} choice {event.choice} index {event.index}"
