"""Files, batches and the lines of a batch as the store has them, and the errors about them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tripool.errors import InvalidRequest, TripoolError

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LINES = 50_000
MAX_FILE_BYTES = 200 * 10**6
MAX_LINE_BYTES = 4 * 2**20
_RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
_PASSING = frozenset({429, 503, 529})
_MAY_BE_ITS_OWN = frozenset({"workers_failed"})
"""Codes of such statuses: a request that workers were lost with again and again may be what they were lost by."""
MAX_TRIES = 8
"""Of a request that fails for what may be its own fault."""
FIRST_REST_S, MAX_REST_S = 0.2, 10.0


def is_retried(status: int) -> bool:
    return status in _RETRIED


def is_passing(status: int, code: str = "") -> bool:
    """Whether a refusal is about the server alone, which has no room, say: then a request is tried until it passes."""
    return status in _PASSING and code not in _MAY_BE_ITS_OWN


class FileUnknown(TripoolError, status=404, code="file_unknown"):
    """The tenant has no such file."""


class BatchUnknown(TripoolError, status=404, code="batch_unknown"):
    """The tenant has no such batch."""


class BatchOver(TripoolError, status=409, code="batch_over"):
    """The batch has ended and cannot be cancelled."""


class FileInUse(TripoolError, status=409, code="file_in_use"):
    """A batch that has not ended reads the file."""


class StorageFull(TripoolError, status=413, code="storage_full"):
    """The tenant's files and batches take all the room it may have."""


class StoreFailed(TripoolError, status=503, code="batch_store_failed"):
    """The store of files and batches cannot be read or written."""


class NoSuchEndpoint(InvalidRequest, code="invalid_endpoint"):
    """Batches are not served for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int | None

    def shown(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        head = {"id": self.id, "object": "file", "bytes": self.num_bytes, "created_at": self.created_s}
        rest = {"filename": self.filename, "purpose": self.purpose, "status": "processed", "status_details": None}
        return head | rest | {"expires_at": self.expires_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    id: str
    tenant: str
    key: str
    """Prefix of the API key that made it: its usage is logged under it."""
    endpoint: str
    input_file_id: str
    window: str
    metadata: dict[str, str] | None
    status: Status
    created_s: int
    expires_s: int
    times: dict[str, int] = field(default_factory=dict)
    """When it came into each of its later states."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Of its input file."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_answered(self) -> bool:
        return self.completed + self.failed == self.total

    def shown(self) -> dict[str, Any]:
        times = {f"{state}_at": self.times.get(state) for state in _TIMED}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


_TIMED = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch, in its input file."""

    batch_id: str
    number: int
    """From 1."""
    offset: int
    size: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class Answered:
    batch_id: str
    number: int
    status_code: int
    """0: it was not run."""
    entry: bytes
    """Its line in the output or error file."""
