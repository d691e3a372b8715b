"""What the pool knows of one slot, and what it answers: plain data, no rules. Pure.

| state | header in the arena | found by key | may be given out |
|---|---|---|---|
| free | free | no | yes |
| reserved | reserved, with its writer | no | no: someone may write there |
| committed | committed | yes | when nobody reads it, in the order of `eviction` |
| doomed | free | no | when its last reader lets go |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from tripool.core import SALT_MARK
from tripool.messages import WorkerId

NAMESPACE_BYTES = 16


@lru_cache(maxsize=4096)
def namespace_tag(namespace: str) -> bytes:
    """How the pool knows a tenant: by a digest, so that arenas and counters hold no names.

    What a client adds to its namespace is not in it, or one tenant could have as many quotas as it thinks up salts.
    Blocks under different salts are apart all the same: by their keys.
    """
    owner = namespace.partition(SALT_MARK)[0]
    return blake2b(owner.encode(), digest_size=NAMESPACE_BYTES, person=b"tripool-space").digest()


class State(IntEnum):
    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    DOOMED = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One slot. `ticket` is the reservation through which its contents came: higher means later."""

    state: State = State.FREE
    key: bytes = b""
    namespace: bytes = b""
    ticket: int = 0
    position: int = 0
    """In its chain, counted from the first block: the later, the more it costs to compute."""
    writer: WorkerId | None = None
    checksum: int = 0
    num_bytes: int = 0
    form: int = 0
    """The writer's own mark, handed to readers as it is: which code path computed the block."""


class Block(NamedTuple):
    """A block that may be read: where it is, and how to tell that it is all there. (A tuple: readers make many.)"""

    slot: int
    checksum: int
    num_bytes: int
    form: int
    from_disk: bool = False
    """It was brought from disk for whoever asks."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix. The lease covers all its blocks; 0 when there are none."""

    lease: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots to write: `slots[i]` is for the key at `positions[i]` of those asked for. Ticket 0: none."""

    ticket: int
    positions: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer says of one slot when it is done with it."""

    slot: int
    checksum: int
    num_bytes: int
    form: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that someone may write, known by its ticket."""

    writer: WorkerId
    deadline_s: float
    slots: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Since the member started, in blocks where nothing else is said."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    evicted: int = 0
    """Forgotten to make room."""
    bad: int = 0
    """Found damaged by a reader."""
    expired_leases: int = 0
    fenced_reservations: int = 0
