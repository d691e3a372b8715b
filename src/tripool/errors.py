"""Every error that a user can see: a typed tree, each with an HTTP status, a stable code and a hint.

The message says what is wrong, the hint what to do about it. Mistakes of our own are assertions, never these.
"""

from __future__ import annotations

from pathlib import Path


class TripoolError(Exception):
    """Root of the tree. `status` is the HTTP status, `code` is what programs match on."""

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None
    """When a retry makes sense; None: not by itself."""

    def __init_subclass__(cls, *, status: int = 0, code: str = "", retry_after_s: float | None = None) -> None:
        """What a subclass does not name is that of its parent."""
        super().__init_subclass__()
        cls.status, cls.code = status or cls.status, code or cls.code
        cls.retry_after_s = cls.retry_after_s if retry_after_s is None else retry_after_s

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(TripoolError, status=400, code="invalid_request"):
    """The request can never succeed."""

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextOverflow(InvalidRequest, code="context_length_exceeded"):
    """The prompt, or the prompt with its `max_tokens`, exceeds the model's context or the KV memory."""

    @classmethod
    def of(cls, context_tokens: int, what: str, *, hint: str, param: str = "prompt") -> ContextOverflow:
        """Begins with the words by which clients recognise this error and shorten their conversation."""
        message = f"this model's maximum context length is {context_tokens} tokens, and {what}"
        return cls(message, hint=hint, param=param)


class ModelNotFound(TripoolError, status=404, code="model_not_found"):
    """The server has no model of this name."""


class EngineStopped(TripoolError, status=503, code="engine_stopped"):
    """The engine is shutting down or has failed; the request was not served."""


class RequestFailed(TripoolError):
    """This request failed inside the server, not through its own fault. Other requests are not affected."""

    def __init__(self, message: str, *, hint: str = "see the server's log for this id") -> None:
        super().__init__(message, hint=hint)

    @classmethod
    def of(cls, request_id: str) -> RequestFailed:
        """Names the request and not the cause, which only the log shows."""
        return cls(f"request {request_id} failed inside the server")


class DeviceOutOfMemory(TripoolError, status=507, code="device_out_of_memory"):
    """A GPU's memory does not suffice: for a model, before it serves; or for a step, whose requests fail."""


class Overloaded(TripoolError, status=429, code="overloaded"):
    """The queue is full. No work on this request was begun."""

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint or f"try again in about {max(1.0, retry_after_s):.0f} s")
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, code="rate_limited"):
    """The tenant exceeds its rate limit."""


class SlowReader(TripoolError, status=408, code="slow_reader"):
    """The client reads its answer so much more slowly than it is generated that the rest is dropped."""


class AboveRateLimit(InvalidRequest, code="above_rate_limit"):
    """One request asks for more than the tenant's limit per minute: waiting does not help."""


class TtftUnreachable(Overloaded, code="ttft_unreachable"):
    """The predicted time to first token exceeds the request's TTFT objective."""


class NoWorkers(TripoolError, status=503, code="no_workers"):
    """No worker of a pool became available within the time that a request may wait for one."""


class WorkersFailed(TripoolError, status=503, code="workers_failed"):
    """Every worker that this request was placed on was lost or refused it."""


class WorkersCrashed(TripoolError, code="workers_crashed"):
    """Workers crash while they compute this request; it is not placed again."""


class CheckpointError(TripoolError, code="bad_checkpoint"):
    """A checkpoint cannot be used. Names the file and, where there is one, the tensor."""

    def __init__(self, message: str, *, hint: str = "", file: Path | str | None = None, tensor: str | None = None):
        where = "".join([f" [file {file}]" if file else "", f" [tensor {tensor}]" if tensor else ""])
        super().__init__(message + where, hint=hint)
        self.file = str(file) if file else None
        self.tensor = tensor


class CheckpointMissing(CheckpointError, status=404, code="checkpoint_missing"):
    """No such model, folder or file."""


class CheckpointTruncated(CheckpointError, code="checkpoint_truncated"):
    """A file ends before its own header says it does, or its header cannot be read."""


class CheckpointCorrupt(CheckpointError, code="checkpoint_corrupt"):
    """The file is complete but its content is invalid (checksum, overlap, invalid JSON)."""


class WrongArchitecture(CheckpointError, code="wrong_architecture"):
    """A model family, or an option of one, that this version does not run."""


class WrongDtype(CheckpointError, code="wrong_dtype"):
    """A tensor type or quantisation that this version does not read."""


class TensorMissing(CheckpointError, code="tensor_missing"):
    """The config requires a tensor that no file holds."""


class TensorShape(CheckpointError, code="tensor_shape"):
    """A tensor's shape contradicts the config."""


def error_of(code: str, message: str, hint: str) -> TripoolError:
    """The error for a code received from another process; a `TripoolError` if the code is unknown here."""
    found, tree = TripoolError, [TripoolError]
    while tree:
        kind = tree.pop()
        found = kind if kind.code == code else found
        tree += kind.__subclasses__()
    return found(message, hint=hint)


class NotExact(TripoolError, code="not_exact"):
    """The exact mode was asked for, and this device, precision or model has no batch-invariant kernels."""


class ArenaError(TripoolError, code="bad_arena"):
    """A cache member's shared memory cannot be created, or is not valid."""


class StoreMissing(TripoolError, status=503, code="store_missing"):
    """The shared store behind the cache cannot be used."""


class DiskError(TripoolError, code="bad_disk"):
    """A cache member's disk cannot be used (any more); the member goes on without it."""


class ExpertMapError(TripoolError, code="bad_expert_map"):
    """An expert map is inconsistent, or no map is possible with these ranks and slots."""


class ExchangeError(TripoolError, code="exchange_failed"):
    """The ranks of an instance cannot exchange rows."""


class RankFenced(SystemExit):
    """The other ranks have given this one up: its process ends, and its sequences are placed again elsewhere.

    Not an Exception, so that what contains the faults of a request or of a step does not take it. The exit status is 0:
    nothing that the rank computed is at fault.
    """

    def __init__(self) -> None:
        super().__init__(0)
