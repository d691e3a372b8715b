"""What a server and the driver of its engine say to each other: objects in one process, messages between two.

| from | to | messages |
|---|---|---|
| server | engine | OpenEngine, AddRequests, CancelRequest, StopEngine |
| engine | server | Progress, StartFailed, EngineReady, StepReport, EngineFailed |

Both are of one version: the server starts the engine's process. Times are of the system's monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import msgspec

from tripool.config import EngineConfig
from tripool.core import Request, ServingStats, TokenEvent
from tripool.engine_protocol import StepEngine
from tripool.errors import TripoolError
from tripool.messages import Message, WireError, strictly
from tripool.text.files import TextFiles

Facts = dict[str, str | int | float]


# ---- server to engine -----------------------------------------------------------------------------------------------


class OpenEngine(Message, frozen=True):
    """The first message: the model to load."""

    model: str
    config: EngineConfig
    weight_folder: str = ""
    """Of the weight cache; empty: there is none."""
    weight_quota_bytes: int = 0
    shares_device: bool = False
    """Other engines have their memory on the same GPU."""


class AddRequests(Message, frozen=True):
    """All of them run, or none."""

    requests: tuple[Request, ...]
    added_s: float


class CancelRequest(Message, frozen=True):
    """Unknown and finished ids are fine."""

    request_id: str


class StopEngine(Message, frozen=True):
    """After the step in progress."""


Command = AddRequests | CancelRequest | StopEngine


# ---- engine to server -----------------------------------------------------------------------------------------------


class Progress(Message, frozen=True):
    """Of loading, for a person to read."""

    text: str


class StartFailed(Message, frozen=True):
    error: TripoolError


class EngineReady(Message, frozen=True):
    """The engine is loaded. The server needs its text files to tokenise."""

    name: str
    text: TextFiles
    context_tokens: int
    step_tokens: int
    weight_bytes: int
    kv_bytes: int
    from_weight_cache: bool

    @classmethod
    def of(cls, engine: StepEngine) -> EngineReady:
        sizes = engine.context_tokens, engine.step_tokens, engine.weight_bytes, engine.kv_bytes
        return cls(engine.name, engine.text, *sizes, engine.from_weight_cache)


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Nothing more comes of these requests."""

    request_ids: tuple[str, ...]
    error: TripoolError
    """A `WireError` between processes."""


class StepReport(Message, frozen=True):
    """All that a step has given; also sent without a step, when something else is to be known at once."""

    events: list[TokenEvent]
    ended: list[Ended]
    facts: dict[str, Facts]
    """New facts of requests, for `explain`."""
    stats: ServingStats
    num_steps: int
    num_preparing: int
    """Requests whose grammars are being compiled: they wait for no step."""


class EngineFailed(Message, frozen=True):
    """The last message."""

    kind: str
    """Of the exception. Its text may contain words of a request, and stays in the engine's log."""


ToEngine = OpenEngine | AddRequests | CancelRequest | StopEngine
ToServer = Progress | StartFailed | EngineReady | StepReport | EngineFailed


def _to_wire(value: object) -> WireError:
    assert isinstance(value, TripoolError)
    return WireError.of(value)


def _from_wire(kind: type, value: object) -> TripoolError:
    return msgspec.convert(value, WireError).error()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer, dec_hook=_from_wire)


def encode(message: ToEngine | ToServer) -> bytes:
    return _encoder.encode(message)


def read_to_engine(data: bytes | memoryview) -> ToEngine:
    return strictly(_to_engine, data)


def read_to_server(data: bytes | memoryview) -> ToServer:
    return strictly(_to_server, data)
