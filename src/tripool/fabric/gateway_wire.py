"""Messages between gateways, the coordinator and its standby. Versioned with all others (`messages.PROTOCOL`).

| from | to | messages |
|---|---|---|
| gateway | coordinator | GatewayHello, Submit, Resume, CancelRequest, Stopped, Charge, Query, Counted, Ask, Reply |
| coordinator | gateway | GatewayWelcome, Status, Events, Failed, QueryResult, Usages, Question, Replies |
| standby | coordinator | Follow |
| coordinator | standby | Leads, Log |

A connection is one session and begins with a GatewayHello. The coordinator answers with a GatewayWelcome, which names
its epoch; the gateway then sends, as Resume, every request of which it holds an open answer, with the tokens that it
holds. What its session does not know, a coordinator computes for nobody: when a session ends, its requests are
cancelled, unless they have an idempotency key (`router/kept.py`). A gateway that has seen an epoch takes nothing from a
lower one.

What gateways want of each other (Ask) the coordinator passes on to all others as a Question, and gathers their Replies.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tripool.core import Request, ServingStats, TokenEvent
from tripool.messages import Message, Name, Natural, WireError, WorkerId, strictly
from tripool.router.held import Held
from tripool.router.kept_types import Count, Keyed
from tripool.router.replica import Record
from tripool.tenants import Tenant

# ---- gateway to coordinator -----------------------------------------------------------------------------------------


QueryKind = Literal["enter", "repeats", "claim", "explain", "pools", "drain", "undrain"]


class GatewayHello(Message, frozen=True):
    protocol: int
    gateway: WorkerId


class Submit(Message, frozen=True):
    """The prompts of one HTTP request, authenticated and checked. `tenant`: with its limits as of now."""

    model: str
    requests: tuple[Request, ...]
    tenant: Tenant
    keyed: Keyed | None = None


class Resume(Message, frozen=True):
    """A request that an earlier coordinator had: its client is still there and has this much of it."""

    model: str
    request: Request
    tenant: Tenant
    held: Held
    keyed: Keyed | None = None
    place: Natural = 0
    """Of its prompt in the HTTP request."""


class CancelRequest(Message, frozen=True):
    """Its client has gone, or needs no more."""

    request_id: str


class Stopped(Message, frozen=True):
    """Of a request with an idempotency key: a stop string was found, and its choices have so many tokens."""

    request_id: str
    lengths: tuple[Natural, ...]


class Counted(Message, frozen=True):
    """The usage of this Count is in the log."""

    id: str


class Charge(Message, frozen=True):
    """A body was read: that costs its tenant a few tokens whatever comes of it."""

    tenant: Tenant
    num_bytes: Natural


class Query(Message, frozen=True):
    """`enter`: counts a request of the tenant before its body is read, or refuses it; `repeats`: whether a request with
    this key (`name`) comes again, and is not to be counted; `claim`: what was first of the key; `explain`: of a
    request's id; `pools`, `drain`, `undrain`: for operators."""

    number: Natural
    what: QueryKind
    tenant: Tenant | None = None
    name: str = ""
    keyed: Keyed | None = None


class Ask(Message, frozen=True):
    """For all other gateways."""

    number: Natural
    what: Name
    body: bytes


class Reply(Message, frozen=True):
    """`number`: of the Question."""

    number: Natural
    body: bytes


# ---- coordinator to gateway -----------------------------------------------------------------------------------------


class GatewayWelcome(Message, frozen=True):
    epoch: Natural


class AdmissionStatus(msgspec.Struct, frozen=True, array_like=True):
    """For metrics. `errors`: of predicted times to first token, counted by bucket, and their sum in seconds."""

    waiting: dict[str, int]
    fairness: float
    errors: tuple[int, ...]
    errors_s: float


class ModelStatus(msgspec.Struct, frozen=True, array_like=True):
    name: str
    context_tokens: Natural
    slots: Natural
    """Choices that all its decode workers compute at the same time; 0: unknown."""
    stats: ServingStats
    admission: AdmissionStatus
    instances: tuple[str, ...]


class Status(Message, frozen=True):
    """Repeated, so that silence is a sign."""

    models: tuple[ModelStatus, ...]
    draining: bool = False


class Usages(Message, frozen=True):
    """To be logged by this gateway, which answers with a Counted for each."""

    counts: tuple[Count, ...]


class Question(Message, frozen=True):
    number: Natural
    what: Name
    body: bytes


class Replies(Message, frozen=True):
    """Of the gateways that answered in time. `number`: of the Ask."""

    number: Natural
    bodies: tuple[bytes, ...]


class Events(Message, frozen=True):
    """New tokens of this gateway's requests, in the order in which the ledger took them."""

    events: tuple[TokenEvent, ...]


class Failed(Message, frozen=True):
    """Nothing more comes of this request."""

    request_id: str
    error: WireError


class QueryResult(Message, frozen=True):
    """`body`: JSON."""

    number: Natural
    body: bytes = b""
    error: WireError | None = None


# ---- between a standby and the coordinator that leads ----------------------------------------------------------------


class Follow(Message, frozen=True):
    protocol: int
    standby: WorkerId


class Leads(Message, frozen=True):
    """The answer: the log follows. Its first record holds everything."""

    pid: Natural
    epoch: Natural


class Log(Message, frozen=True):
    """Repeated, also without news: silence is a sign."""

    record: Record


FromGateway = GatewayHello | Submit | Resume | CancelRequest | Stopped | Charge | Query | Counted | Ask | Reply | Follow
ToGateway = GatewayWelcome | Status | Events | Failed | QueryResult | Usages | Question | Replies
ToStandby = Leads | Log

_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_standby: msgspec.msgpack.Decoder[ToStandby] = msgspec.msgpack.Decoder(ToStandby)


def read_from_gateway(identity: bytes, data: bytes) -> FromGateway:
    """Raises DecodeError on anything else than one of these messages."""
    return strictly(_from_gateway, data)


def read_to_gateway(data: bytes) -> ToGateway:
    return strictly(_to_gateway, data)


def read_to_standby(data: bytes) -> ToStandby:
    return strictly(_to_standby, data)
