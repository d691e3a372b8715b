"""Messages of the cache pool: small questions and answers; the blocks themselves travel through shared memory.

| from | to | messages |
|---|---|---|
| peer | member | Open, Lookup, Release, Used, Reserve, Commit, Ask, Purge, Quotas |
| member | peer | Opened, Found, Granted, Told, Purged |
| supervisor | member | Suspect, Reaped (see `tripool.messages`) |

Questions carry a number and answers repeat it: an answer that comes too late for its question is recognised. Release,
Used and Commit are not answered. `nonce` names the arena that slots are of: one that was made anew has another.

One datagram of a local socket (SOCK_SEQPACKET) per message, not ZeroMQ: a look-up is most of what a small hit costs,
and ZeroMQ's two more threads on the way make it several times slower. Arenas are mapped, so members and peers are on
one machine anyway. When a peer dies its line closes, and its leases end at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from tripool.cache.arena import MAX_WORKER_NAME_BYTES
from tripool.messages import SUPERVISOR, Checksum, FileName, Natural, Positive, Reaped, Suspect, WorkerId, strictly

PROTOCOL = 2
KEY_BYTES = 16
MAX_KEYS = 4096
"""Of one question: a context of 256 K tokens with one member."""
MAX_MESSAGE_BYTES = 2**18

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_FEW = msgspec.Meta(max_length=MAX_KEYS)
Keys = Annotated[tuple[Key, ...], _FEW]
Slots = Annotated[tuple[Small, ...], _FEW]
Numbers = Annotated[tuple[Natural, ...], _FEW]
"""Leases and tickets."""
Checksums = Annotated[tuple[Checksum, ...], _FEW]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---- peer to member ----------------------------------------------------------------------------------------------


class Open(_Message, frozen=True):
    """Where is your arena? First question to a member, and again whenever it has been away.

    Who asks is writing nothing: what it had reserved, perhaps in answers that were lost, is free.
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
    """Leases that are not needed any more."""
    wait_ms: Small = 0
    """How long the answer may wait for blocks that come from disk."""


class Release(_Message, frozen=True):
    worker_id: WorkerId
    leases: Numbers
    bad: Slots = ()
    """Slots of theirs whose bytes did not fit their checksums."""


class Used(_Message, frozen=True):
    """Blocks that were read without asking."""

    worker_id: WorkerId
    slots: Slots
    tickets: Numbers
    bad: Slots = ()
    """Slots whose bytes did not fit their checksums."""


class Reserve(_Message, frozen=True):
    number: Natural
    worker_id: WorkerId
    namespace: Key
    keys: Keys
    depths: Slots = ()
    """Where each of them is in its chain: later blocks cost more to compute again."""


class Commit(_Message, frozen=True):
    """Done with all slots of a ticket; those not listed were not written."""

    worker_id: WorkerId
    ticket: Natural
    slots: Slots = ()
    checksums: Checksums = ()
    sizes: Slots = ()
    form: Small = 0


class Ask(_Message, frozen=True):
    number: Natural


class Purge(_Message, frozen=True):
    number: Natural
    namespace: Key


class Quotas(_Message, frozen=True):
    """Most slots of these namespaces, instead of all that was said before. Answered by Purged."""

    number: Natural
    slots: dict[Key, Natural]


# ---- member to peer ----------------------------------------------------------------------------------------------


class Opened(_Message, frozen=True):
    number: Natural
    protocol: Natural
    member: WorkerId
    arena: FileName
    """In the folder that pool and peers share."""
    nonce: Natural
    write_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    """How long a writer has from reservation to commit."""
    reader_slot: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1
    """Where this peer may sit in the arena to read without asking; -1: all seats are taken."""


class Found(_Message, frozen=True):
    """Columns: one entry per block of the prefix."""

    number: Natural
    nonce: Natural
    lease: Natural
    slots: Slots
    checksums: Checksums
    sizes: Slots
    forms: Slots
    from_disk: Slots = ()
    """Places in these columns of blocks that were on disk alone when this was asked."""


class Granted(_Message, frozen=True):
    number: Natural
    nonce: Natural
    ticket: Natural
    positions: Slots
    slots: Slots


class Disk(msgspec.Struct, frozen=True, array_like=True):
    """The tier behind a member's memory."""

    state: str
    """opening, on, or why it is off."""
    num_bytes: Natural
    used_bytes: Natural = 0
    blocks: Natural = 0
    pending: Natural = 0
    """Blocks of memory that have no copy yet."""
    written: Natural = 0
    promoted: Natural = 0
    """Blocks that came back to memory."""
    lost: Natural = 0
    """Forgotten by memory before they could be written."""
    forgotten: Natural = 0
    bad: Natural = 0


class Told(_Message, frozen=True):
    number: Natural
    slot_bytes: Positive
    num_slots: Positive
    free: Natural
    reserved: Natural
    fenced: Natural
    """Of the reserved ones: those of late or lost writers."""
    committed: Natural
    leases: Natural
    hits: Natural
    misses: Natural
    evicted: Natural
    bad: Natural
    expired_leases: Natural
    strange_messages: Natural
    held: dict[Key, Natural]
    """Slots in use by `namespace_tag`, of the largest namespaces."""
    disk: Disk | None = None


class Purged(_Message, frozen=True):
    number: Natural
    num_blocks: Natural


Question = Open | Lookup | Release | Used | Reserve | Commit | Ask | Purge | Quotas | Suspect | Reaped
Answer = Opened | Found | Granted | Told | Purged

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def address(folder: Path, member: str) -> Path:
    """Where a member listens: beside its arena."""
    return folder / f"{member}.sock"


def encode(message: Question | Answer) -> bytes:
    return _encoder.encode(message)


def decode_question(data: bytes | memoryview) -> Question:
    """Raises msgspec.DecodeError, and nothing else, on anything else."""
    return strictly(_questions, data)


def decode_answer(data: bytes | memoryview) -> Answer:
    return strictly(_answers, data)


def may_say(question: Question, worker_ids: set[WorkerId], member: WorkerId) -> bool:
    """Whether the sender may send this. A connection speaks for one worker, then in `worker_ids`, and never for
    the member itself; only the supervisor's connection reports that others have ended."""
    if isinstance(question, (Suspect, Reaped)):
        return any(worker_id.name == SUPERVISOR for worker_id in worker_ids)
    if isinstance(question, (Ask, Purge, Quotas)) or question.worker_id in worker_ids:
        return True
    name = question.worker_id.name  # a longer one does not fit into a header, which could not say whose the slot is
    if worker_ids or name == member.name or len(name.encode()) > MAX_WORKER_NAME_BYTES:
        return False
    worker_ids.add(question.worker_id)
    return True
