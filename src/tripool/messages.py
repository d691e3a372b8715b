"""Every message between processes: msgspec structs, msgpack on the wire, one protocol version for all of them.

| from | to | messages |
|---|---|---|
| worker | coordinator | Hello, Heartbeat, Tokens, TransferReady, TransferDone, Refused, Left |
| coordinator | worker | Welcome, StartPrefill, StartDecode, Release, Cancel, Drain |
| coordinator | supervisor | Suspect |
| supervisor | coordinator, cache | Reaped |
| supervisor | gateway | Drain |
| any child | supervisor | Ready |
| rank | supervisor | SilentRank; also between supervisor and host server, about ranks of other hosts |
| host server | supervisor | RemoteRank |
| supervisor | rank | MapChanged |
| supervisor | standby | Assign |

A `WorkerId` is a worker's name ("decode-0") and the epoch of its process. A restarted worker has a larger epoch,
whatever the wall clock says, and messages of an older one are dropped. An attempt numbers the placements of one
request: every StartPrefill and every StartDecode has its own, so a worker may hold several of one request at once and
knows each by (request, attempt). The ledger drops events of old attempts, so a client sees each token once.

A Hello begins a session and says that its sender holds nothing; a worker that has received nothing from the coordinator
for some seconds, or whose connection broke, drops everything and sends Hello until it receives a Welcome. Messages of
an earlier session are dropped at both ends. The coordinator answers every Heartbeat of a trusted worker with a Welcome.
Messages between gateways and the coordinator are in `fabric/gateway_wire.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from tripool.core import Request, TokenEvent
from tripool.errors import InvalidRequest, TripoolError, error_of

PROTOCOL = 4
SUPERVISOR = "supervisor"
Role = Literal["prefill", "decode", "cache"]

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits, the largest integer on the wire."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
FileName = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[^/\x00]+$")]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A typed error on its way to another process."""

    code: str
    message: str
    hint: str
    retry_after_s: float | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: TripoolError) -> WireError:
        param = error.param if isinstance(error, InvalidRequest) else None
        return cls(error.code, error.message, error.hint, error.retry_after_s, param)

    def error(self) -> TripoolError:
        error = error_of(self.code, self.message, self.hint)
        error.retry_after_s = self.retry_after_s
        if isinstance(error, InvalidRequest):
            error.param = self.param
        return error


class WorkerId(msgspec.Struct, frozen=True, array_like=True):
    """One run of one worker process: its name, and an epoch that grows with every start."""

    name: Name
    epoch: Natural

    def __str__(self) -> str:
        return f"{self.name}.{self.epoch}"


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice that its client already has: replayed through the decode form, never sampled again."""

    choice: Natural
    tokens: tuple[Natural, ...]


class KvDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """How the KV of a choice is reached. Only a transfer of its kind reads the payload: see `fabric.kv_transfer`."""

    kind: Name
    payload: bytes


# ---- worker to coordinator ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Registers a worker: its first message, and again when a Welcome comes from a new coordinator."""

    protocol: int
    role: Role
    worker_id: WorkerId
    pid: Natural
    model: str
    kv_tokens: Natural
    """KV capacity in tokens."""
    max_running: Positive
    context_tokens: Positive
    vocab: Positive
    instance: str = ""
    """The instance that this worker is a rank of. Empty: it is an instance by itself."""
    reserved_for: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The only tenant whose requests are placed on this worker. Empty: all of them."""

    @property
    def instance_name(self) -> str:
        return self.instance or self.worker_id.name


class Heartbeat(Message, frozen=True):
    """Reports periodically that a worker is alive, and its progress. A worker with work and no new step is stalled."""

    worker_id: WorkerId
    num_steps: Natural
    waiting_tokens: Natural
    running: Natural
    blocks_held: Natural
    """KV blocks held by sequences or transfers; anything but 0 in an idle worker is a leak."""
    ceiling: Natural | None = None
    """Sequences that may run at once within the TPOT objectives. None: no objective."""


class Stamped(msgspec.Struct, frozen=True, array_like=True):
    attempt: Natural
    event: TokenEvent


class Tokens(Message, frozen=True):
    """All tokens of one step."""

    worker_id: WorkerId
    events: tuple[Stamped, ...]


class TransferReady(Message, frozen=True):
    """A choice's prefill is done: its first token is sampled, its KV is ready for a decode worker."""

    worker_id: WorkerId
    request_id: str
    attempt: Natural
    choice: Natural
    lease: Natural
    """Under which the worker keeps the KV; unique within its epoch."""
    num_tokens: Natural
    """Leading tokens (prompt and answer) whose KV it is."""
    descriptor: KvDescriptor


class TransferDone(Message, frozen=True):
    """The decode worker has copied and verified the KV; the lease may be released."""

    worker_id: WorkerId
    request_id: str
    attempt: Natural
    choice: Natural


class Refused(Message, frozen=True):
    """A worker refuses its part of an attempt, or failed at it; it holds nothing of it any more."""

    worker_id: WorkerId
    request_id: str
    attempt: Natural
    code: str
    """`code` of an error in `tripool.errors`."""
    message: str
    hint: str
    final: bool
    """True: the request is at fault, and no other worker could serve it. False: it may be placed elsewhere."""


class Left(Message, frozen=True):
    """The worker is drained, holds nothing, and its process ends."""

    worker_id: WorkerId


# ---- coordinator to worker ---------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    epoch: Natural
    """Of the coordinator's process. A worker has no other coordinator of a lower one from then on."""
    heartbeat_s: Annotated[float, msgspec.Meta(ge=0.001, le=60)]
    """Longest interval between two heartbeats."""


class StartPrefill(Message, frozen=True):
    """To a prefill worker: compute prompt and answers so far, sample each choice's next token, offer its KV."""

    request: Request
    attempt: Natural
    answered: tuple[Answered, ...]
    """The choices still open; at the first attempt all of them, without tokens."""
    deadline_s: Seconds
    """From receipt; afterwards the worker refuses the request as not final."""
    lease_s: float = 60.0
    """How long the worker keeps a choice's KV without a Release or Cancel."""


class StartDecode(Message, frozen=True):
    """To a decode worker: copy the KV and continue the choice."""

    request: Request
    attempt: Natural
    answered: Answered
    """Tokens so far; the newest has no KV yet."""
    descriptor: KvDescriptor
    num_cached_tokens: Natural
    deadline_s: Seconds


class Release(Message, frozen=True):
    """To a prefill worker: the KV is copied, or not needed any more."""

    lease: Natural


class Cancel(Message, frozen=True):
    """Drop every choice of this attempt and its KV. Unknown and finished attempts are ignored."""

    request_id: str
    attempt: Natural


class Drain(Message, frozen=True):
    """Accept no more work; send Left once nothing is held."""


# ---- supervisor --------------------------------------------------------------------------------------------------


class Suspect(Message, frozen=True):
    """To the supervisor: this worker is silent. Kill it, reap it, send Reaped, start another."""

    worker_id: WorkerId


class Reaped(Message, frozen=True):
    """This process has ended and is reaped: it will never write anywhere again."""

    worker_id: WorkerId
    crashed: bool = False
    """It ended through its own fault, not by a signal of the supervisor or the operator."""


class Ready(Message, frozen=True):
    """From a child to the supervisor: it serves. Gateways and coordinators repeat it: the supervisor monitors them."""

    worker_id: WorkerId
    block_bytes: Natural = 0
    """Size of the worker's KV blocks, 0 if it has none: the cache pool's slots must hold one."""


class SilentRank(Message, frozen=True):
    """From a rank to the supervisor: another rank of its instance has left a request unanswered for so long."""

    worker_id: WorkerId
    rank: Natural
    map_epoch: Natural
    """Of the expert map under which the request was sent."""
    silence_s: Seconds
    instance: str = ""
    """Between hosts; empty: the sender's own."""


class RemoteRank(Message, frozen=True):
    """From the host server to the supervisor of the server's own host: a rank that runs on another host. Repeated."""

    instance: Name
    rank: Natural
    process: Natural
    """A number that no other process has; 0: there is none, or its host is silent."""


class Assign(Message, frozen=True):
    """To a standby process: become the process with these arguments."""

    argv: tuple[str, ...]
    epoch: Natural


class MapChanged(Message, frozen=True):
    """To a rank: the expert map of its instance is another one. The map itself is a file: see `control.instance`."""

    map_epoch: Natural


FromWorker = Hello | Heartbeat | Tokens | TransferReady | TransferDone | Refused | Left
ToWorker = Welcome | StartPrefill | StartDecode | Release | Cancel | Drain
AnyMessage = FromWorker | ToWorker | Suspect | Reaped | Ready | SilentRank | RemoteRank | MapChanged | Assign

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

# Besides DecodeError: invalid UTF-8, unbounded nesting, and a request that its own class refuses.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, TripoolError)

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.DecodeError, and nothing else, on anything else than one of these messages."""
    return strictly(_decoder, data)


def decode_from_worker(data: bytes) -> FromWorker:
    return strictly(_from_worker, data)


def decode_to_worker(data: bytes) -> ToWorker:
    return strictly(_to_worker, data)


def strictly(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        return decoder.decode(data)
    except _UNREADABLE as error:
        raise msgspec.DecodeError(f"not a valid message: {error}") from error
