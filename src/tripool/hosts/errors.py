"""What can go wrong between hosts. Each says at which step of a start it happened, and what to do about it."""

from __future__ import annotations

from tripool.errors import TripoolError


class HostError(TripoolError, status=503, code="host_unreachable"):
    """A step between two hosts failed."""

    step = "connect"

    def __init__(self, message: str, *, hint: str = "", step: str = "") -> None:
        self.step = step or self.step
        super().__init__(f"step '{self.step}': {message}", hint=hint)


class NotAHost(HostError, code="not_a_host"):
    """Something else listens there."""

    step = "greet"


class WrongProtocol(HostError, code="host_protocol"):
    """The other side speaks another version of this protocol."""

    step = "greet"


class WrongTrust(HostError, code="host_trust"):
    """One side encrypts and the other does not."""

    step = "greet"


class WrongToken(HostError, code="host_token"):
    """The two sides do not have the same token."""

    step = "authenticate"


class JoinRefused(HostError, code="join_refused"):
    """The server does not take this worker; `step` says why."""


class TransferMissing(TripoolError, status=503, code="transfer_missing"):
    """The chosen transfer does not work on this machine."""
