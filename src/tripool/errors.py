"""Every error a user can meet: a typed tree, each with an HTTP status, a stable code and a hint.

The message says what is wrong, the hint says what to do about it. Our own mistakes are assertions, never these.
"""

from __future__ import annotations

from pathlib import Path


class TripoolError(Exception):
    """Root of the tree. `status` is what HTTP answers, `code` is what programs match on."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(TripoolError):
    """The caller asked for something that can never work."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextOverflow(InvalidRequest):
    """Prompt (plus what it asks to generate) exceeds the model's context or the KV memory."""

    code = "context_length_exceeded"


class ModelNotFound(TripoolError):
    status = 404
    code = "model_not_found"


class EngineStopped(TripoolError):
    """The engine is shutting down or has failed; the request was not served."""

    status = 503
    code = "engine_stopped"


class RequestFailed(TripoolError):
    """Something went wrong with this request alone, and not by its own fault. Others are served on."""

    def __init__(self, message: str, *, hint: str = "the server's log says more under this id") -> None:
        super().__init__(message, hint=hint)

    @classmethod
    def of(cls, request_id: str) -> RequestFailed:
        """Says which one it was, and nothing of what went wrong: that is for the log."""
        return cls(f"request {request_id} failed inside the server")


class Overloaded(TripoolError):
    """More waits already than may wait. Nothing of this request was begun."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The tenant asks faster than it may."""

    code = "rate_limited"


class SlowReader(TripoolError):
    """A client takes its answer so much more slowly than it is made that nobody keeps the rest for it."""

    status = 408
    code = "slow_reader"


class AboveRateLimit(InvalidRequest):
    """One request asks for more than its tenant's limit holds: waiting does not help."""

    code = "above_rate_limit"


class TtftUnreachable(Overloaded):
    """The first token would come later than the request says it may."""

    code = "ttft_unreachable"


class NoWorkers(TripoolError):
    """No worker of a pool came within the time that a request may wait for one."""

    status = 503
    code = "no_workers"


class WorkersFailed(TripoolError):
    """Every worker that was given this request was lost or gave it back."""

    status = 503
    code = "workers_failed"


class WorkersCrashed(TripoolError):
    """Workers crash of this request, or while they compute it; it is not tried again."""

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
    """The bytes are all there but are not what they claim to be (checksum, overlap, invalid JSON)."""

    code = "checkpoint_corrupt"


class WrongArchitecture(CheckpointError):
    """A model family, or an option of one, that this version does not run."""

    code = "wrong_architecture"


class WrongDtype(CheckpointError):
    """A tensor type or quantisation that this version does not read."""

    code = "wrong_dtype"


class TensorMissing(CheckpointError):
    """The config promises a tensor that no file holds."""

    code = "tensor_missing"


class TensorShape(CheckpointError):
    """A tensor's shape contradicts the config."""

    code = "tensor_shape"


def error_of(code: str, message: str, hint: str) -> TripoolError:
    """The error that another process named by its code; the root of the tree for a code that is not known here."""
    found, tree = TripoolError, [TripoolError]
    while tree:
        kind = tree.pop()
        found = kind if kind.code == code else found
        tree += kind.__subclasses__()
    return found(message, hint=hint)


class ArenaError(TripoolError):
    """A cache member's shared memory cannot be made, or is not what it should be."""

    code = "bad_arena"


class DiskError(TripoolError):
    """A cache member's disk cannot be used, or cannot be used any more; memory goes on without it."""

    code = "bad_disk"
