"""The cache pool in virtual time: the real index of each member, placed on the real ring. Pure.

Blocks have no bytes here; moving them takes the time that their bytes would. A member that falls loses its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tripool.cache import PoolIndex, Ring
from tripool.cache.records import Written
from tripool.messages import WorkerId

_LEASE_S = 30.0
_WRITE_S = 30.0


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

    def reserve(self, keys: Sequence[bytes], writer: WorkerId, namespace: bytes, now_s: float) -> Writing:
        """Room for those blocks of a chain that the pool does not know."""
        grants, num_blocks = [], 0
        for stretch in self._ring.member_ranges(keys):
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
