"""The coordinator's sessions with gateways: whose requests are open, and what goes to whom. Pure.

A session is one connection (`line`). When it ends, its requests are cancelled; what has an idempotency key goes on for
a while (`kept.py`), and other readers may join it. Outputs are for workers and the supervisor; what goes to gateways is
in `unsent`, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tripool.core import Request, TokenEvent
from tripool.errors import InvalidRequest, ModelNotFound, TripoolError
from tripool.router.held import Held, HeldChoice, Taken
from tripool.router.kept import KeptAnswers
from tripool.router.kept_types import AnswerChanged, Count, Keyed, Name, Part, Start
from tripool.router.outputs import Output
from tripool.router.service import ModelService
from tripool.tenants import Tenant


class Failure(NamedTuple):
    """Nothing more comes of this request."""

    request_id: str
    error: TripoolError


ForGateway = TokenEvent | Failure | Count


@dataclass(slots=True, eq=False)
class Session:
    line: bytes
    out: list[ForGateway] = field(default_factory=list)
    """Not sent yet."""
    requests: set[str] = field(default_factory=set)
    """Open ones, by the ids that the gateway knows."""


@dataclass(slots=True, eq=False)
class _Owner:
    """Of one open request without an idempotency key."""

    session: Session
    model: str
    choices_left: int
    """Whose last token was not sent yet. The service may be done with all of them by then: it decides about all tokens
    of a step before the first of them is sent."""


class Sessions:
    def __init__(self, services: Mapping[str, ModelService], kept: KeptAnswers | None = None) -> None:
        self.kept = KeptAnswers() if kept is None else kept
        self.unsent: list[Session] = []
        """Those with something to send."""
        self._services = services
        self._sessions: dict[bytes, Session] = {}
        self._owners: dict[str, _Owner] = {}
        self.counts: dict[str, tuple[Count, bytes | None]] = {}
        """Usage that no gateway has logged yet, and the line of the one that was asked to."""
        self._new_counts: list[Count] = []
        self._counted: list[str] = []
        """For the log: since it was last written."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, line: bytes) -> bool:
        return line in self._sessions

    def num_requests(self, line: bytes) -> int:
        return len(self._sessions[line].requests)

    # ---- what services bring ----------------------------------------------------------------------------------------

    def emit(self, event: TokenEvent) -> None:
        owner = self._owners.get(event.request_id)
        if owner is None:
            part = self.kept.of_request(event.request_id)
            if part is not None:
                self._emit_kept(part, event)
            return
        self._put(owner.session, event)
        if event.finish_reason is not None:
            owner.choices_left -= 1
            if not owner.choices_left:
                self._forget(event.request_id)

    def _emit_kept(self, part: Part, event: TokenEvent) -> None:
        taken = self.kept.take(part, event)
        if taken is Taken.OTHER:
            self.kept.cancels.append((part.kept.model, part.request_id))
            self.fail(part.request_id, AnswerChanged("the answer was computed again, and is another one"))
        elif taken is Taken.NEW:
            for reader_id, line in part.readers.items():
                own = event if reader_id == event.request_id else event.of_request(reader_id, event.stages)
                self._put(self._sessions[line], own)
        if part.running and part.progress.done:
            self._release(part)
            self.kept.ended(part)

    def fail(self, request_id: str, error: TripoolError) -> None:
        owner = self._owners.get(request_id)
        if owner is not None:
            self._put(owner.session, Failure(request_id, error))
            self._forget(request_id)
            return
        part = self.kept.of_request(request_id)
        if part is not None:
            for reader_id, line in part.readers.items():
                self._put(self._sessions[line], Failure(reader_id, error))
            self._release(part)
            self.kept.failed(part)

    def _release(self, part: Part) -> None:
        for reader_id, line in part.readers.items():
            self._sessions[line].requests.discard(reader_id)

    def _put(self, session: Session, item: ForGateway) -> None:
        if not session.out:
            self.unsent.append(session)
        session.out.append(item)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).session.requests.discard(request_id)

    # ---- what gateways bring ----------------------------------------------------------------------------------------

    def joined(self, line: bytes) -> None:
        assert line not in self._sessions
        self._sessions[line] = Session(line)

    def gone(self, line: bytes, now_s: float) -> list[Output]:
        """A gateway whose connection has ended serves its clients no more."""
        session, out = self._sessions.pop(line), list[Output]()
        session.out.clear()
        for request_id in list(session.requests):
            out += self._cancel(session, request_id, now_s)
        for count_id, (count, asked) in self.counts.items():
            if asked == line:
                self.counts[count_id] = count, None
        return out + self.settle(now_s)

    def submit(
        self, line: bytes, model: str, requests: Sequence[Request], tenant: Tenant, now_s: float,
        keyed: Keyed | None = None,
    ) -> list[Output]:  # fmt: skip
        """The prompts of one HTTP request."""
        session, service = self._sessions[line], self._services.get(model)
        try:
            if service is None:
                raise ModelNotFound(f"there is no model '{model}'")
            if any(self._is_open(request.id) for request in requests):
                raise InvalidRequest("a request id is in use")
            if keyed is not None:
                return self._submit_keyed(session, model, keyed, requests, tenant, now_s)
        except TripoolError as error:
            for request in requests:
                self._put(session, Failure(request.id, error))
            return []
        for request in requests:
            self._own(session, request.id, model, request.params.n)
        return service.submit(requests, tenant, now_s)

    def _submit_keyed(
        self, session: Session, model: str, keyed: Keyed, requests: Sequence[Request], tenant: Tenant, now_s: float
    ) -> list[Output]:
        parts, starts = self.kept.submit(keyed, tenant, model, requests, session.line)
        for part, request in zip(parts, requests, strict=True):
            for event in part.progress.events(request.id):
                self._put(session, event)
            if request.id in part.readers:
                session.requests.add(request.id)
        if all(start.held is None for start in starts):
            fresh = [start.request for start in starts]
            out = list(self._services[model].submit(fresh, tenant, now_s)) if fresh else []
        else:
            out = [output for start in starts for output in self._go_on(start, now_s)]
        return out + self.settle(now_s)

    def resume(
        self, line: bytes, model: str, request: Request, tenant: Tenant, held: Held, now_s: float,
        keyed: Keyed | None = None, place: int = 0,
    ) -> list[Output]:  # fmt: skip
        """A request that an earlier coordinator had."""
        session, service = self._sessions[line], self._services.get(model)
        if service is None or self._is_open(request.id):
            return []
        if keyed is None:
            self._own(session, request.id, model, request.params.n - sum(choice.done for choice in held.choices))
            return service.resume(request, tenant, held, now_s)
        known = self.kept.get((tenant.name, keyed.name))
        before = known.parts[place].progress.lengths if known is not None and place in known.parts else ()
        try:
            part, starts = self.kept.rejoin(keyed, tenant, model, place, request, held, line)
        except TripoolError as error:
            self._put(session, Failure(request.id, error))
            return []
        if request.id in part.readers:
            session.requests.add(request.id)
        lengths = tuple(len(choice.tokens) for choice in held.choices)
        for event in part.progress.events(request.id):
            if event.index >= lengths[event.choice]:
                self._put(session, event)
            elif before and event.index >= before[event.choice]:
                self._put_to_others(part, event)
        if part.progress.done and part.readers:
            self._release(part)
            self.kept.ended(part)
        out = [output for start in starts for output in self._go_on(start, now_s)]
        return out + self.settle(now_s)

    def _put_to_others(self, part: Part, event: TokenEvent) -> None:
        """A token that one reader has, and others lack: the log did not have it yet."""
        for reader_id, line in part.readers.items():
            if reader_id != event.request_id:
                self._put(self._sessions[line], event.of_request(reader_id, None))

    def _go_on(self, start: Start, now_s: float) -> list[Output]:
        kept, request = start.part.kept, start.request
        held = start.held or Held((HeldChoice(()),) * request.params.n)
        return self._services[kept.model].resume(request, kept.tenant, held, now_s)

    def cancel(self, line: bytes, request_id: str, now_s: float) -> list[Output]:
        """Its client has gone."""
        return self._cancel(self._sessions[line], request_id, now_s) + self.settle(now_s)

    def _cancel(self, session: Session, request_id: str, now_s: float) -> list[Output]:
        if request_id not in session.requests:
            return []
        owner = self._owners.get(request_id)
        if owner is None:
            session.requests.discard(request_id)
            self.kept.left(request_id)
            return []
        self._forget(request_id)
        return self._services[owner.model].cancel(request_id, now_s)

    def stopped(self, line: bytes, request_id: str, lengths: Sequence[int], now_s: float) -> list[Output]:
        """Its gateway found a stop string: these are the tokens of its choices."""
        session = self._sessions[line]
        if request_id in session.requests and request_id not in self._owners:
            session.requests.discard(request_id)
            self.kept.stopped(request_id, lengths)
        return self.cancel(line, request_id, now_s)

    def counted(self, count_id: str) -> None:
        """A gateway has logged it."""
        if self.counts.pop(count_id, None) is not None:
            self._counted.append(count_id)

    def count_news(self, *, everything: bool) -> tuple[tuple[Count, ...], tuple[str, ...], tuple[Name, ...]]:
        """For the log: usage to be logged, usage that was, and answers that are forgotten."""
        if everything:
            return tuple(count for count, _ in self.counts.values()), (), ()
        counts, self._new_counts = tuple(self._new_counts), []
        counted, self._counted = tuple(self._counted), []
        removed, self.kept.removed = tuple(self.kept.removed), []
        return counts, counted, removed

    def canonical(self, request_id: str) -> str:
        """The id by which workers know what the gateway knows by this one."""
        part = self.kept.of_reader(request_id)
        return request_id if part is None else part.request_id

    @property
    def unsettled(self) -> bool:
        return bool(self.kept.cancels or self.kept.counts)

    def tick(self, now_s: float) -> list[Output]:
        out = [output for start in self.kept.tick(now_s) for output in self._go_on(start, now_s)]
        return out + self.settle(now_s)

    def settle(self, now_s: float) -> list[Output]:
        """Carry out what the kept answers left to be done."""
        out: list[Output] = []
        cancels, self.kept.cancels = self.kept.cancels, []
        for model, request_id in cancels:
            out += self._services[model].cancel(request_id, now_s)
        counts, self.kept.counts = self.kept.counts, []
        self.counts |= {count.id: (count, None) for count in counts}
        self._new_counts += counts
        if self._sessions:
            line, session = next(iter(self._sessions.items()))
            for count_id, (count, asked) in self.counts.items():
                if asked is None:
                    self.counts[count_id] = count, line
                    self._put(session, count)
        return out

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _is_open(self, request_id: str) -> bool:
        return request_id in self._owners or self.kept.of_reader(request_id) is not None

    def _own(self, session: Session, request_id: str, model: str, num_choices: int) -> None:
        self._owners[request_id] = _Owner(session, model, num_choices)
        session.requests.add(request_id)

    def check(self) -> None:
        """The invariants, in full."""
        self.kept.check()
        parts = [part for kept in self.kept for part in kept.parts.values()]
        readers = {(reader_id, line) for part in parts for reader_id, line in part.readers.items()}
        owned = {(request_id, owner.session.line) for request_id, owner in self._owners.items()}
        open_ = {(request_id, line) for line, session in self._sessions.items() for request_id in session.requests}
        assert open_ == readers | owned, "a request without its gateway, or the other way round"
        for part in parts:
            there = part.request_id in self._services[part.kept.model]
            assert part.running == there, f"{part.request_id}: computed by nobody, or for nobody"
