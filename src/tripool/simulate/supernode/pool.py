"""The cache pool in virtual time: the real index of each member on the real ring, and a worker's client of it. Pure.

Blocks have no bytes; moving them takes the time that their bytes would. A member that fails loses its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, Self

from tripool.bench.trace import TraceRequest
from tripool.cache import PoolIndex, Ring, namespace_tag
from tripool.cache.records import Written
from tripool.messages import WorkerId
from tripool.simulate.supernode.layout import Site
from tripool.simulate.supernode.links import Link, carry
from tripool.simulate.timeline import ARRIVAL, to_fs

_LEASE_S = 30.0
_WRITE_S = 30.0
_WAIT_FS = to_fs(0.25)
"""Longest wait for the link, as that of `tripool.cache.client.PoolClient`: what would take longer is a miss."""

_OWN = 1 << 62
"""Names of blocks that no other request shares begin here."""


def chain_keys(request: TraceRequest, serial: int, block_tokens: int, namespace: str) -> list[bytes]:
    """Of the prompt's full blocks of `block_tokens`. A trace's id stands for a block and all before it, as keys do: of
    several smaller ones in a block, the last one's is the block's."""
    salt = _salt(namespace)
    count = request.input_tokens // block_tokens
    ids, size = request.block_ids, request.block_tokens
    names: Sequence[int]
    if not ids:
        first = _OWN + (serial << 24)
        names = range(first, first + count)
    elif block_tokens % size == 0:
        merged = block_tokens // size
        names = ids[merged - 1 :: merged][:count]
    else:
        assert size % block_tokens == 0, "one of the two sizes divides the other"
        parts = size // block_tokens
        names = list(islice((block_id * parts + part for block_id in ids for part in range(parts)), count))
    try:
        return [salt + name.to_bytes(8, "little", signed=True) for name in names]
    except OverflowError:
        return [salt + _eight_bytes(name) for name in names]


def _eight_bytes(name: int) -> bytes:
    """Of any id: hashes of a trace may have all 64 bits, or more."""
    if -(2**63) <= name < 2**63:
        return name.to_bytes(8, "little", signed=True)
    return blake2b(str(name).encode(), digest_size=8).digest()


@lru_cache(maxsize=2**10)
def _salt(namespace: str) -> bytes:
    return namespace_tag(namespace)[:8]


class Member:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._epoch = 0
        self.up = False
        self.restart()

    def restart(self) -> None:
        self._epoch += 1
        self.index = PoolIndex(
            self._num_slots, lease_s=_LEASE_S, write_s=_WRITE_S, first_number=1 + self._epoch * 10**12
        )
        self.up = True


@dataclass(frozen=True, slots=True)
class Found:
    """The longest known stretch of a chain, leased."""

    num_blocks: int
    leases: tuple[tuple[Member, int], ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """Blocks that are on their way to their members."""

    num_blocks: int
    grants: tuple[tuple[Member, int, tuple[int, ...]], ...]


class CachePool:
    def __init__(self, num_members: int, member_slots: int) -> None:
        self.members = {f"cache-{number}": Member(member_slots) for number in range(num_members)}
        self._ring = Ring(self.members)

    def find(self, keys: Sequence[bytes], first: int, reader: WorkerId, namespace: bytes, now_s: float) -> Found:
        """From position `first` on, as far as the chain is known without a gap."""
        leases, num_blocks = [], 0
        for stretch in self._ring.member_ranges(keys, first):
            member = self.members[stretch.member]
            if not member.up:
                break
            hit = member.index.lookup(keys[stretch.start : stretch.stop], reader, namespace, now_s)
            if hit.lease:
                leases.append((member, hit.lease))
            num_blocks += len(hit.blocks)
            if len(hit.blocks) < stretch.stop - stretch.start:
                break
        return Found(num_blocks, tuple(leases))

    def release(self, found: Found, reader: WorkerId) -> None:
        for member, lease in found.leases:
            member.index.release(lease, reader)

    def reserve(
        self, keys: Sequence[bytes], writer: WorkerId, namespace: bytes, now_s: float, first: int = 0
    ) -> Writing:
        """Room for those blocks of a chain, from position `first` on, that the pool does not know."""
        grants, num_blocks = [], 0
        for stretch in self._ring.member_ranges(keys, first):
            member = self.members[stretch.member]
            if member.up:
                depths = range(stretch.start, stretch.stop)
                grant = member.index.reserve(keys[stretch.start : stretch.stop], writer, namespace, now_s, depths)
                if grant.ticket:
                    grants.append((member, grant.ticket, grant.slots))
                    num_blocks += len(grant.slots)
        return Writing(num_blocks, tuple(grants))

    def commit(self, writing: Writing, writer: WorkerId, block_bytes: int) -> None:
        for member, ticket, slots in writing.grants:
            member.index.commit(ticket, writer, [Written(slot, 0, block_bytes) for slot in slots])
            member.index.take_changes()

    def reaped(self, worker_id: WorkerId) -> None:
        for member in self.members.values():
            member.index.reaped(worker_id)

    def expire(self, now_s: float) -> None:
        for member in self.members.values():
            member.index.expire(now_s)

    def check(self) -> None:
        for member in self.members.values():
            member.index.check()


class ModelledClient:
    """A prefill worker's client of the pool, over a link of its own; stands where `PoolClient` does.

    The worker waits while blocks are read: `wait_fs` tells the instance for how long. Blocks that are stored
    leave by themselves, and can be found once they are there.
    """

    def __init__(self, site: Site, pool: CachePool, worker_id: WorkerId, number: int) -> None:
        self._site, self._pool, self._worker_id, self._number = site, pool, worker_id, number
        rate = site.layout.links.cache_bytes_per_s  # of each direction
        self.link, self._outward, self._first_fs = Link(rate), Link(rate), to_fs(site.layout.links.cache_s)
        self._until_fs = 0

    @property
    def wait_fs(self) -> int:
        """How long the worker still has to wait for what it has read."""
        return max(0, self._until_fs - self._site.timeline.now_fs)

    def find(self, keys: Sequence[bytes], *, namespace: str, first: int = 0) -> ModelledPrefix:
        timeline = self._site.timeline
        if self.link.free_fs - timeline.now_fs > _WAIT_FS:
            return ModelledPrefix(0)
        found = self._pool.find(keys, first, self._worker_id, namespace_tag(namespace), timeline.now_s)
        if found.num_blocks:
            self._until_fs = self._move(self.link, found.num_blocks, "cache reads")
            timeline.at(self._until_fs, ARRIVAL, self._number, self._pool.release, found, self._worker_id)
        return ModelledPrefix(found.num_blocks)

    def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        namespace: str,
        first: int = 0,
        form: int = 0,
        checksums: Sequence[int] = (),
    ) -> int:
        chain, timeline = keys[: first + len(blocks)], self._site.timeline
        writing = self._pool.reserve(chain, self._worker_id, namespace_tag(namespace), timeline.now_s, first)
        if writing.num_blocks:
            there_fs = self._move(self._outward, writing.num_blocks, "cache writes")
            timeline.at(there_fs, ARRIVAL, self._number, self._stored, writing)
        return writing.num_blocks

    def cut(self, until_fs: int) -> None:
        self.link.cut(until_fs)
        self._outward.cut(until_fs)

    def _move(self, link: Link, num_blocks: int, name: str) -> int:
        """To or from the pool; returns when it is there."""
        num_bytes, now_fs = num_blocks * self._site.layout.block_bytes, self._site.timeline.now_fs
        self._site.slices.count(name, num_bytes, now_fs)
        return carry((link,), num_bytes, now_fs, self._first_fs)

    def _stored(self, writing: Writing) -> None:
        if self._site.trusts(self._worker_id):
            self._pool.commit(writing, self._worker_id, self._site.layout.block_bytes)


@dataclass(frozen=True, slots=True)
class ModelledPrefix:
    num_blocks: int

    @property
    def from_disk(self) -> Sequence[bool]:
        return ()

    def read(self, into: Sequence[Any]) -> int:
        return min(self.num_blocks, len(into))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
