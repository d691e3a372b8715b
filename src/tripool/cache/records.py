"""Records of the cache pool: one slot, one hit, one grant, one reservation. Plain data. Pure.

| state | header in the arena | found by key | may be reused |
|---|---|---|---|
| free | free | no | yes |
| reserved | reserved, with its writer | no | no: its writer may be writing |
| committed | committed | yes | when unread, in the order of `eviction` |
| doomed | free | no | when its last lease ends |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from tripool.core import owner
from tripool.messages import Checksum, Small, WorkerId

NAMESPACE_BYTES = 16


@lru_cache(maxsize=4096)
def namespace_tag(namespace: str) -> bytes:
    """Digest that identifies a tenant in the pool, so that arenas and counters hold no names.

    A client's cache salt is not part of it, or one tenant could have as many quotas as salts. Blocks with different
    salts are still separate, by their keys.
    """
    return blake2b(owner(namespace).encode(), digest_size=NAMESPACE_BYTES, person=b"tripool-space").digest()


class State(IntEnum):
    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    DOOMED = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One slot. `ticket` is the reservation that wrote it: higher means later."""

    state: State = State.FREE
    key: bytes = b""
    namespace: bytes = b""
    ticket: int = 0
    position: int = 0
    """Position in its chain, from 0: later blocks cost more to compute."""
    writer: WorkerId | None = None
    checksum: int = 0
    num_bytes: int = 0
    form: int = 0
    """Opaque mark of the writer, passed to readers: which code path computed the block."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in a tier behind memory."""

    key: bytes
    namespace: bytes
    position: int
    checksum: int
    num_bytes: int
    form: int


class Block(NamedTuple):
    """Slot and checksum of a readable block. (A NamedTuple: readers create many. The types hold in messages.)"""

    slot: Small
    checksum: Checksum
    num_bytes: Small
    form: Small
    from_disk: bool = False
    """The block was read from disk for this look-up."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix. The lease covers all its blocks; 0 if there are none."""

    lease: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots to write: `slots[i]` is for the key at `positions[i]` of the request. Ticket 0: none."""

    ticket: int
    positions: tuple[int, ...]
    slots: tuple[int, ...]


class Written(NamedTuple):
    """Result of writing one slot."""

    slot: Small
    checksum: Checksum
    num_bytes: Small
    form: Small = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that a writer may write until it commits."""

    writer: WorkerId
    deadline_s: float
    slots: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Counts since the member started, in blocks unless named otherwise."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    evicted: int = 0
    """Evicted to make room."""
    bad: int = 0
    """Reported damaged by a reader."""
    expired_leases: int = 0
    fenced_reservations: int = 0
