"""Every error that a user can see: a typed tree, each with an HTTP status, a stable code and a hint.

The message says what is wrong, the hint what to do about it. Mistakes of our own are assertions, never these.
"""

from __future__ import annotations

from pathlib import Path


class TripoolError(Exception):
    """Root of the tree. `status` is the HTTP status, `code` is what programs match on."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(TripoolError):
    """The request can never succeed."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt with its `max_tokens`, exceeds the model's context or the KV memory."""

    code = "context_length_exceeded"


class ModelNotFound(TripoolError):
    status = 404
    code = "model_not_found"


class EngineStopped(TripoolError):
    """The engine is shutting down or has failed; the request was not served."""

    status = 503
    code = "engine_stopped"


class RequestFailed(TripoolError):
    """This request failed inside the server, not through its own fault. Other requests are not affected."""

    def __init__(self, message: str, *, hint: str = "see the server's log for this id") -> None:
        super().__init__(message, hint=hint)

    @classmethod
    def of(cls, request_id: str) -> RequestFailed:
        """Names the request and not the cause, which only the log shows."""
        return cls(f"request {request_id} failed inside the server")


class Overloaded(TripoolError):
    """The queue is full. No work on this request was begun."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint or f"try again in about {max(1.0, retry_after_s):.0f} s")
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The tenant exceeds its rate limit."""

    code = "rate_limited"


class SlowReader(TripoolError):
    """The client reads its answer so much more slowly than it is generated that the rest is dropped."""

    status = 408
    code = "slow_reader"


class AboveRateLimit(InvalidRequest):
    """One request asks for more than the tenant's limit per minute: waiting does not help."""

    code = "above_rate_limit"


class TtftUnreachable(Overloaded):
    """The predicted time to first token exceeds the request's TTFT objective."""

    code = "ttft_unreachable"


class NoWorkers(TripoolError):
    """No worker of a pool became available within the time that a request may wait for one."""

    status = 503
    code = "no_workers"


class WorkersFailed(TripoolError):
    """Every worker that this request was placed on was lost or refused it."""

    status = 503
    code = "workers_failed"


class WorkersCrashed(TripoolError):
    """Workers crash while they compute this request; it is not placed again."""

    code = "workers_crashed"


class CheckpointError(TripoolError):
    """A checkpoint cannot be used. Names the file and, where there is one, the tensor."""

    code = "bad_checkpoint"

    def __init__(self, message: str, *, hint: str = "", file: Path | str | None = None, tensor: str | None = None):
        where = "".join([f" [file {file}]" if file else "", f" [tensor {tensor}]" if tensor else ""])
        super().__init__(message + where, hint=hint)
        self.file = str(file) if file else None
        self.tensor = tensor


class CheckpointMissing(CheckpointError):
    """No such model, folder or file."""

    status = 404
    code = "checkpoint_missing"


class CheckpointTruncated(CheckpointError):
    """A file ends before its own header says it does, or its header cannot be read."""

    code = "checkpoint_truncated"


class CheckpointCorrupt(CheckpointError):
    """The file is complete but its content is invalid (checksum, overlap, invalid JSON)."""

    code = "checkpoint_corrupt"


class WrongArchitecture(CheckpointError):
    """A model family, or an option of one, that this version does not run."""

    code = "wrong_architecture"


class WrongDtype(CheckpointError):
    """A tensor type or quantisation that this version does not read."""

    code = "wrong_dtype"


class TensorMissing(CheckpointError):
    """The config requires a tensor that no file holds."""

    code = "tensor_missing"


class TensorShape(CheckpointError):
    """A tensor's shape contradicts the config."""

    code = "tensor_shape"


def error_of(code: str, message: str, hint: str) -> TripoolError:
    """The error for a code received from another process; a `TripoolError` if the code is unknown here."""
    found, tree = TripoolError, [TripoolError]
    while tree:
        kind = tree.pop()
        found = kind if kind.code == code else found
        tree += kind.__subclasses__()
    return found(message, hint=hint)


class ArenaError(TripoolError):
    """A cache member's shared memory cannot be created, or is not valid."""

    code = "bad_arena"


class DiskError(TripoolError):
    """A cache member's disk cannot be used (any more); the member goes on without it."""

    code = "bad_disk"
