"""What the coordinator wants done: messages to send, tokens for clients, failures, and calls for the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core import TokenEvent
from tripool.errors import TripoolError
from tripool.messages import Cancel, Drain, Release, StartDecode, StartPrefill, Suspect, Welcome, WorkerId


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: WorkerId
    """This run of the worker and no other: a message for a life that is over must be dropped, not redirected."""
    message: Welcome | StartPrefill | StartDecode | Release | Cancel | Drain


@dataclass(frozen=True, slots=True)
class Emit:
    """A token for the client, each exactly once and in order. A request is over when all its choices have a finish."""

    event: TokenEvent


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is over; nothing of it is held anywhere."""

    request_id: str
    error: TripoolError


@dataclass(frozen=True, slots=True)
class ToSupervisor:
    message: Suspect


@dataclass(frozen=True, slots=True)
class Lost:
    """For the log: a worker counts no more, and what it had of so many requests is placed again or given up."""

    worker_id: WorkerId
    num_requests: int


Output = Send | Emit | Fail | ToSupervisor | Lost
