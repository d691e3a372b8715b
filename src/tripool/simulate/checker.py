"""Whether every client got what it must: each token once, in order, unchanged, and an end. Pure.

Knows requests and what an undisturbed run would answer; of workers only whom the gateway has asked last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tripool.core import FinishReason, Request, TokenEvent
from tripool.errors import TripoolError
from tripool.messages import AnyMessage, Cancel, KvDescriptor, StartDecode, StartPrefill, Tokens, WorkerId


@dataclass(slots=True)
class _Client:
    request: Request
    answers: list[tuple[list[int], FinishReason]]
    num_seen: list[int]
    num_open: int
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class Checker:
    may_refuse: bool
    answer: Callable[[Request, int], tuple[list[int], FinishReason]]
    """What an undisturbed run gives for a request and choice."""
    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_requests: int = 0
    _open: dict[str, _Client] = field(default_factory=dict)
    _placed: dict[tuple[str, int], tuple[WorkerId, int]] = field(default_factory=dict)
    """The worker last asked for each (request, choice), and as which attempt."""
    _descriptors: dict[tuple[str, int], KvDescriptor] = field(default_factory=dict)
    """What each (request, attempt) was to be decoded from."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    def arrived(self, request: Request) -> None:
        count = request.params.n
        answers = [self.answer(request, choice) for choice in range(count)]
        self._open[request.id] = _Client(request, answers, [0] * count, count)
        self.num_requests += 1

    def sent_to_worker(self, worker_id: WorkerId, message: AnyMessage) -> None:
        match message:
            case StartPrefill():
                for each in message.answered:
                    self._placed[message.request.id, each.choice] = worker_id, message.attempt
            case StartDecode():
                self._descriptors[message.request.id, message.attempt] = message.descriptor
                self._placed[message.request.id, message.answered.choice] = worker_id, message.attempt
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

    def descriptor(self, request_id: str, attempt: int) -> KvDescriptor | None:
        return self._descriptors.get((request_id, attempt))

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
        if request_id in self._open:
            self._end(request_id, "cancelled")

    def failed(self, request_id: str, error: TripoolError) -> Request:
        """Returns what was asked for, so that its client can ask again."""
        assert request_id in self._open, f"{request_id}: failed after its end"
        client = self._open[request_id]
        fine = self.may_refuse and error.code == "overloaded" and not any(client.num_seen)
        assert fine, f"{request_id}: failed although there was capacity: {error}"
        self._end(request_id, error.code)
        return client.request

    def refused(self, request: Request, error: TripoolError) -> None:
        """By admission control: only where that may be, with a fitting reason, and before the request was placed."""
        client = self._open[request.id]
        begun = any(client.num_seen) or any((request.id, choice) in self._placed for choice in range(request.params.n))
        assert not begun, f"{request.id}: refused after it was begun"
        assert self.may_refuse, f"{request.id}: refused although there was room: {error}"
        assert error.status == 429 and (error.retry_after_s or 0) > 0, f"{request.id}: refused without advice"
        promised = error.code != "ttft_unreachable" or request.slo.ttft_ms is not None
        assert promised, f"{request.id}: refused for a promise that it never had"
        self._end(request.id, error.code)

    def request(self, request_id: str) -> Request:
        return self._open[request_id].request

    def reset(self) -> list[Request]:
        """The gateway died, and every client's connection with it. Returns what they had asked for."""
        requests = [client.request for client in self._open.values()]
        for request in requests:
            self._end(request.id, "gateway died")
        return requests

    def _end(self, request_id: str, outcome: str) -> None:
        for choice in range(self._open.pop(request_id).request.params.n):
            self._placed.pop((request_id, choice), None)
        self.outcomes[outcome] += 1


def _where(event: TokenEvent) -> str:
    return f"{event.request_id} choice {event.choice} index {event.index}"
