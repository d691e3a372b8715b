"""Outputs of the coordinator: messages to send, tokens for clients, failures, and notices for supervisor and log."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core import TokenEvent
from tripool.errors import TripoolError
from tripool.messages import Cancel, Drain, Release, StartDecode, StartPrefill, Suspect, Welcome, WorkerId


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: WorkerId
    """This epoch of the worker and no other: a message for an ended one must be dropped, not redirected."""
    message: Welcome | StartPrefill | StartDecode | Release | Cancel | Drain


@dataclass(frozen=True, slots=True)
class Emit:
    """A token for the client, each exactly once and in order. A request is over when all its choices are finished."""

    event: TokenEvent


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has failed; nothing of it is held anywhere."""

    request_id: str
    error: TripoolError


@dataclass(frozen=True, slots=True)
class ToSupervisor:
    message: Suspect


@dataclass(frozen=True, slots=True)
class Lost:
    """For the log: a worker was lost, and so many requests on it are placed again or fail."""

    worker_id: WorkerId
    num_requests: int


Output = Send | Emit | Fail | ToSupervisor | Lost
