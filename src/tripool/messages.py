"""Every message that crosses a process: msgspec structs, msgpack on the wire, one version for all of them.

| from | to | messages |
|---|---|---|
| worker | gateway | Hello, Pulse, Tokens, Packed, Adopted, Refused, Left |
| gateway | worker | Welcome, Begin, Adopt, Release, Cancel, Drain |
| gateway | supervisor | Suspect |
| supervisor | gateway, cache | Reaped |
| supervisor | gateway | Drain |
| any child | supervisor | Ready |

A worker is named once per life: `worker` is its place ("decode-0"), `epoch` its life. Whoever restarts has a larger
epoch, whatever the wall clock says, and messages of an old one are dropped. An attempt numbers the placements of one
request: every Begin and every Adopt has its own, so a worker may hold several of one request at once and knows each by
(request, attempt). Events of old attempts are dropped by the ledger, so a client sees each token once.

A Hello begins a session and says that its sender holds nothing; a worker that has heard nothing from the gateway for
some seconds, or whose connection broke, drops everything and says Hello until it is welcomed. Messages of an earlier
session reach nobody, either way. The gateway answers every Pulse of a worker that it trusts with a Welcome.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tripool.core import Request, TokenEvent

PROTOCOL = 1
Role = Literal["prefill", "decode", "cache"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One run of one worker."""

    worker: str
    epoch: int


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """What a client already has of one choice: replayed through the decode form, never sampled again."""

    choice: int
    tokens: tuple[int, ...]


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A choice's KV, packed for another worker: blocks in an arena, readable until the lease ends."""

    arena: str
    """File name below the run folder."""
    lease: int
    """Unique within the worker's life."""
    offsets: tuple[int, ...]
    """Byte offset of each block, in order of position; the last may be partly filled."""
    checksums: tuple[int, ...]
    block_bytes: int
    num_tokens: int
    """Leading tokens (prompt and answer) whose KV is here."""


# ---- worker to gateway -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a life, and again whenever a gateway's Welcome shows that the gateway is a new one."""

    protocol: int
    role: Role
    life: Life
    pid: int
    model: str
    kv_tokens: int
    """Tokens whose KV fits."""
    max_running: int
    context_tokens: int
    vocab: int


class Pulse(Message, frozen=True):
    """Still here, and how far: sent at least every `pulse_s` while the process lives. Work but no step is a stall."""

    life: Life
    num_steps: int
    waiting_tokens: int
    running: int
    blocks_held: int
    """KV blocks that some sequence or parcel holds; 0 when idle, or something leaks."""
    ceiling: int | None = None
    """Sequences that may run there at once so that promised times per token are kept. None: nothing was promised."""


class Stamped(msgspec.Struct, frozen=True, array_like=True):
    attempt: int
    event: TokenEvent


class Tokens(Message, frozen=True):
    """All tokens of one step."""

    life: Life
    events: tuple[Stamped, ...]


class Packed(Message, frozen=True):
    """Prefill is done with a choice: its first tokens are sampled, its KV waits for a decode worker."""

    life: Life
    request_id: str
    attempt: int
    choice: int
    parcel: Parcel


class Adopted(Message, frozen=True):
    """A decode worker has copied and checked a parcel; it may be released."""

    life: Life
    request_id: str
    attempt: int
    choice: int


class Refused(Message, frozen=True):
    """A worker will not, or could not, do its part of an attempt; it holds nothing of it any more."""

    life: Life
    request_id: str
    attempt: int
    code: str
    """`code` of the error tree."""
    message: str
    hint: str
    final: bool
    """True: no other worker could (the request is at fault). False: worth another attempt elsewhere."""


class Left(Message, frozen=True):
    """Drained: nothing is held, the process ends."""

    life: Life


# ---- gateway to worker -------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    gateway_epoch: int
    pulse_s: float
    """Longest silence between two pulses."""


class Begin(Message, frozen=True):
    """To prefill: compute prompt and answers so far, sample each choice's next token, pack what goes on."""

    request: Request
    attempt: int
    answered: tuple[Answered, ...]
    """The choices still open. At the first attempt: all of them, without tokens."""
    deadline_s: float
    """From receipt; then the worker refuses it as not final."""
    parcel_s: float = 60.0
    """How long a packed choice is kept, if nobody says anything about it."""


class Adopt(Message, frozen=True):
    """To decode: take a parcel over and go on from there."""

    request: Request
    attempt: int
    answered: Answered
    """Tokens so far, the newest of which has no KV yet."""
    parcel: Parcel
    num_cached_tokens: int
    deadline_s: float


class Release(Message, frozen=True):
    """To prefill: this parcel is copied, or nobody will come for it."""

    lease: int


class Cancel(Message, frozen=True):
    """Forget every choice of this attempt, parcels included. Unknown and finished ones are fine."""

    request_id: str
    attempt: int


class Drain(Message, frozen=True):
    """Take no more work; send Left once nothing is held."""


# ---- supervisor --------------------------------------------------------------------------------------------------


class Suspect(Message, frozen=True):
    """To the supervisor: this life is silent. Kill it, reap it, say so, start another."""

    life: Life


class Reaped(Message, frozen=True):
    """This life is over for certain: it will never write anywhere again."""

    life: Life
    crashed: bool = False
    """It ended by its own fault, not because somebody ended it."""


class Ready(Message, frozen=True):
    """From a child to the supervisor: it serves. A gateway says so again and again, because nobody else watches it."""

    life: Life
    block_bytes: int = 0
    """Of a worker that has KV blocks: what the cache pool's slots must hold."""


AnyMessage = (
    Hello | Pulse | Tokens | Packed | Adopted | Refused | Left
    | Welcome | Begin | Adopt | Release | Cancel | Drain
    | Suspect | Reaped | Ready
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError (ValidationError included) on anything that is not one of these messages."""
    message: AnyMessage = _decoder.decode(data)
    return message
