"""Messages of the cache pool: small requests and replies; the blocks themselves go through shared memory.

| from | to | messages |
|---|---|---|
| client | member | Open, Lookup, Release, Used, Reserve, Commit, GetStats, Purge, Quotas |
| member | client | Opened, LookupResult, Granted, Stats, Purged |
| supervisor | member | Suspect, Reaped (see `tripool.messages`) |

Requests carry a number and replies repeat it, so that a late reply is recognised. Release, Used and Commit have no
reply. `nonce` identifies the arena that slots belong to: a recreated arena has another.

Each message is one datagram of a local socket (SOCK_SEQPACKET), not ZeroMQ: a look-up is most of the cost of a small
hit, and ZeroMQ's two extra threads make it several times slower. Arenas are mapped, so members and clients are on one
machine anyway. When a client dies its connection closes, and its leases end at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from tripool.cache.arena import MAX_WORKER_NAME_BYTES
from tripool.cache.records import Block, Written
from tripool.messages import SUPERVISOR, FileName, Natural, Positive, Reaped, Small, Suspect, WorkerId, strictly

PROTOCOL = 3
KEY_BYTES = 16
MAX_KEYS = 4096
"""Keys per request: a context of 256 K tokens on one member."""

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_FEW = msgspec.Meta(max_length=MAX_KEYS)
Keys = Annotated[tuple[Key, ...], _FEW]
Slots = Annotated[tuple[Small, ...], _FEW]
Numbers = Annotated[tuple[Natural, ...], _FEW]
"""Lease and ticket numbers."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---- peer to member ----------------------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """GetStats for the arena: the first request to a member, repeated after every reconnect.

    The sender is writing nothing: its reservations, also those whose replies were lost, are free.
    """

    number: Natural
    protocol: Natural
    worker_id: WorkerId


class Lookup(_Message, frozen=True):
    number: Natural
    worker_id: WorkerId
    namespace: Key
    keys: Keys
    done: Numbers = ()
    """Leases to release."""
    wait_ms: Small = 0
    """How long the reply may wait for blocks from disk."""


class Release(_Message, frozen=True):
    worker_id: WorkerId
    leases: Numbers
    bad: Slots = ()
    """Slots of these leases whose bytes did not match their checksums."""


class Used(_Message, frozen=True):
    """Blocks read by shared reads, without a request."""

    worker_id: WorkerId
    uses: Annotated[tuple[tuple[Small, Natural], ...], _FEW]
    """Slot of each block, and the ticket that wrote it."""
    bad: Slots = ()
    """Slots whose bytes did not match their checksums."""


class Reserve(_Message, frozen=True):
    number: Natural
    worker_id: WorkerId
    namespace: Key
    keys: Keys
    depths: Slots = ()
    """Position of each key in its chain: later blocks cost more to recompute."""


class Commit(_Message, frozen=True):
    """End a reservation; slots that are not listed were not written."""

    worker_id: WorkerId
    ticket: Natural
    written: Annotated[tuple[Written, ...], _FEW] = ()


class GetStats(_Message, frozen=True):
    number: Natural


class Purge(_Message, frozen=True):
    number: Natural
    namespace: Key


class Quotas(_Message, frozen=True):
    """Replace all quotas (slots by namespace). Answered by Purged."""

    number: Natural
    slots: dict[Key, Natural]


# ---- member to peer ----------------------------------------------------------------------------------------------


class Opened(_Message, frozen=True):
    number: Natural
    protocol: Natural
    member: WorkerId
    arena: FileName
    """File name in the folder shared by members and clients."""
    nonce: Natural
    write_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    """Longest time from reservation to commit."""
    reader_slot: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1
    """This client's reader slot in the arena for shared reads; -1: none is free."""


class LookupResult(_Message, frozen=True):
    """The blocks of the prefix, in order."""

    number: Natural
    nonce: Natural
    lease: Natural
    blocks: Annotated[tuple[Block, ...], _FEW]


class Granted(_Message, frozen=True):
    number: Natural
    nonce: Natural
    ticket: Natural
    positions: Slots
    slots: Slots


class Disk(msgspec.Struct, frozen=True, array_like=True):
    """State of a member's disk tier."""

    state: str
    """"opening", "on", or "off: " and the reason."""
    num_bytes: Natural
    used_bytes: Natural = 0
    blocks: Natural = 0
    pending: Natural = 0
    """Blocks in memory without a copy on disk."""
    written: Natural = 0
    promoted: Natural = 0
    """Blocks read back into memory."""
    lost: Natural = 0
    """Evicted from memory before they were written."""
    forgotten: Natural = 0
    bad: Natural = 0


class Stats(_Message, frozen=True):
    number: Natural
    slot_bytes: Positive
    num_slots: Positive
    free: Natural
    reserved: Natural
    fenced: Natural
    """Reserved slots of late or lost writers."""
    committed: Natural
    leases: Natural
    hits: Natural
    misses: Natural
    evicted: Natural
    bad: Natural
    expired_leases: Natural
    strange_messages: Natural
    held: dict[Key, Natural]
    """Slots in use by `namespace_tag`, for the largest namespaces."""
    disk: Disk | None = None


class Purged(_Message, frozen=True):
    number: Natural
    num_blocks: Natural


Request = Open | Lookup | Release | Used | Reserve | Commit | GetStats | Purge | Quotas | Suspect | Reaped
Reply = Opened | LookupResult | Granted | Stats | Purged

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def address(folder: Path, member: str) -> Path:
    """Socket of a member, beside its arena."""
    return folder / f"{member}.sock"


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Request:
    """Raises only msgspec.DecodeError on invalid data."""
    return strictly(_requests, data)


def decode_reply(data: bytes | memoryview) -> Reply:
    return strictly(_replies, data)


def may_say(request: Request, worker_ids: set[WorkerId], member: WorkerId) -> bool:
    """Whether the sender may send this. A connection speaks for one worker, recorded in `worker_ids`, and never for the
    member itself; only the supervisor's connection reports that others have ended."""
    if isinstance(request, (Suspect, Reaped)):
        return any(worker_id.name == SUPERVISOR for worker_id in worker_ids)
    if isinstance(request, (GetStats, Purge, Quotas)) or request.worker_id in worker_ids:
        return True
    name = request.worker_id.name  # a longer name does not fit into a slot header
    if worker_ids or name == member.name or len(name.encode()) > MAX_WORKER_NAME_BYTES:
        return False
    worker_ids.add(request.worker_id)
    return True
