"""Outputs of the coordinator: messages to send, tokens for clients, failures, and notices for supervisor and log."""

from __future__ import annotations

import msgspec

from tripool.core import TokenEvent
from tripool.errors import TripoolError
from tripool.messages import Cancel, Drain, Release, StartDecode, StartPrefill, Suspect, Welcome, WorkerId


class Send(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    """This epoch of the worker and no other: a message for an ended one must be dropped, not redirected."""
    message: Welcome | StartPrefill | StartDecode | Release | Cancel | Drain


class Emit(msgspec.Struct, frozen=True):
    """A token for the client, each exactly once and in order. A request is over when all its choices are finished."""

    event: TokenEvent


class Fail(msgspec.Struct, frozen=True):
    """The request has failed; nothing of it is held anywhere."""

    request_id: str
    error: TripoolError


class ToSupervisor(msgspec.Struct, frozen=True):
    message: Suspect


class Lost(msgspec.Struct, frozen=True):
    """For the log: a worker was lost, and so many requests on it are placed again or fail."""

    worker_id: WorkerId
    num_requests: int


Output = Send | Emit | Fail | ToSupervisor | Lost
