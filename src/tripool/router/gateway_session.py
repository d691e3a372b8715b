"""A gateway's session with the coordinator: its open requests with what came of each, and whom it believes. Pure.

| the coordinator is lost when | then |
|---|---|
| the connection ends | another is made, to the coordinator that answers at the same address |
| nothing is heard for `SILENCE_S` | the same |
| it skips a token, or its epoch is below one seen before | the same |
| none has answered for `AWAY_S` | open requests fail |

A coordinator that welcomes the gateway is given every open request with the tokens that came, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from tripool.core import Request, TokenEvent
from tripool.router.held import Held, Progress, Taken
from tripool.router.kept_types import Keyed
from tripool.tenants import Tenant

SILENCE_S = 2.5
"""Longest silence of a coordinator that has welcomed this gateway; it speaks several times a second."""
AWAY_S = 30.0

T = TypeVar("T")


class Submission(NamedTuple):
    """The prompts of one HTTP request."""

    model: str
    requests: tuple[Request, ...]
    tenant: Tenant
    keyed: Keyed | None = None


class Resumption(NamedTuple):
    """A request that an earlier coordinator had, and what there is of it here."""

    model: str
    request: Request
    tenant: Tenant
    held: Held
    keyed: Keyed | None = None
    place: int = 0


class OpenRequest(Generic[T]):
    __slots__ = ("_submission", "place", "progress", "reader", "request", "since_s")

    def __init__(self, submission: Submission, place: int, reader: T, now_s: float) -> None:
        """`reader`: whoever gets its tokens."""
        self._submission, self.place, self.reader, self.since_s = submission, place, reader, now_s
        self.request = submission.requests[place]
        self.progress = Progress(self.request.params.n, keeps_scores=submission.keyed is not None)

    def resumption(self) -> Resumption:
        model, _, tenant, keyed = self._submission
        return Resumption(model, self.request, tenant, self.progress.held(), keyed, self.place)


class GatewaySession(Generic[T]):
    def __init__(self, now_s: float) -> None:
        self.epoch = 0
        """The highest of any coordinator that has welcomed this gateway: those of lower ones decide nothing."""
        self.welcome = False
        self.heard_s = now_s
        self.open: dict[str, OpenRequest[T]] = {}
        self._unsent: list[Submission] = []
        """Came while there was no coordinator."""

    def submit(self, submission: Submission, reader: T, now_s: float) -> bool:
        """Whether to send it now; else it goes with the next welcome."""
        for place, request in enumerate(submission.requests):
            self.open[request.id] = OpenRequest(submission, place, reader, now_s)
        if not self.welcome:
            self._unsent.append(submission)
        return self.welcome

    def close(self, request_id: str) -> OpenRequest[T] | None:
        """Its client has gone, it failed, or its end was found."""
        return self.open.pop(request_id, None)

    def disconnected(self) -> None:
        self.welcome = False

    def welcomed(self, epoch: int) -> Iterator[Resumption | Submission] | None:
        """What to send to the coordinator of this epoch. None: it leads no more."""
        if epoch < self.epoch:
            return None
        self.epoch, self.welcome = epoch, True
        unsent, self._unsent = self._unsent, []
        fresh = {request.id for submission in unsent for request in submission.requests}
        resumed: list[Resumption | Submission] = [
            one.resumption() for request_id, one in self.open.items() if request_id not in fresh
        ]
        # Where a client has gone meanwhile, its prompts are not sent.
        kept = [one for one in unsent if all(request.id in self.open for request in one.requests)]
        return iter([*resumed, *kept])

    def take(self, event: TokenEvent) -> tuple[Taken, OpenRequest[T] | None]:
        """None: its client has gone. The request is closed with its last token."""
        one = self.open.get(event.request_id)
        if one is None:
            return Taken.KNOWN, None
        taken = one.progress.take(event)
        if taken is Taken.NEW and one.progress.done:
            del self.open[event.request_id]
        return taken, one

    def is_silent(self, now_s: float) -> bool:
        return self.welcome and now_s - self.heard_s > SILENCE_S

    def given_up(self, now_s: float) -> Sequence[OpenRequest[T]]:
        """Requests that have waited for a coordinator for too long."""
        if self.welcome or now_s - self.heard_s <= AWAY_S:
            return ()
        return [one for one in self.open.values() if one.since_s < now_s - AWAY_S]
