"""Consistent hashing of blocks over cache members, so that most blocks stay in point when members come and go. Pure.

Blocks are placed by segment: `SEGMENT_BLOCKS` consecutive blocks of a chain are on one member, by the key of the first.
Placed block by block, losing one of N members would cut every chain after about N blocks, and each look-up would ask
all members. Placed chain by chain, all prompts with the same beginning would be on one member. With segments, a short
prompt asks one member, a long one several at once, and a popular prefix is spread after its first segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

SEGMENT_BLOCKS = 16
_POINTS = 128
"""Points of one member on the ring: its share of the keys is then even within a few tens of percent."""


@dataclass(frozen=True, slots=True)
class MemberRange:
    """Positions `start` to `stop` (exclusive) of a chain, all on one member."""

    member: str
    start: int
    stop: int


class Ring:
    def __init__(self, members: Iterable[str]) -> None:
        self.members = tuple(sorted(set(members)))
        points = sorted((_point(f"{member}#{n}".encode()), member) for member in self.members for n in range(_POINTS))
        self._points = [point for point, _ in points]
        self._owners = [member for _, member in points]

    def owner(self, key: bytes) -> str:
        """The member whose point follows the key's point."""
        assert self.members, "an empty ring owns nothing"
        if len(self.members) == 1:
            return self.members[0]
        return self._owners[bisect_right(self._points, _point(key)) % len(self._owners)]

    def next_owner(self, key: bytes, without: Container[str]) -> str | None:
        """The owner if the members `without` were gone: what it has been given, it is asked for then."""
        at = bisect_right(self._points, _point(key))
        around = (self._owners[(at + step) % len(self._owners)] for step in range(len(self._owners)))
        return next((member for member in around if member not in without), None)

    def member_ranges(self, keys: Sequence[bytes], first: int = 0) -> list[MemberRange]:
        """Members of the blocks of a chain, from position `first` on. `keys` is the chain from its first block."""
        if len(self.members) == 1:
            return [MemberRange(self.members[0], first, len(keys))] if first < len(keys) else []
        found: list[MemberRange] = []
        if first < len(keys) <= SEGMENT_BLOCKS:  # most prompts
            return [MemberRange(self.owner(keys[0]), first, len(keys))]
        for start in range(first - first % SEGMENT_BLOCKS, len(keys), SEGMENT_BLOCKS):
            member, stop = self.owner(keys[start]), min(start + SEGMENT_BLOCKS, len(keys))
            if found and found[-1].member == member:
                found[-1] = MemberRange(member, found[-1].start, stop)
            else:
                found.append(MemberRange(member, max(start, first), stop))
        return found


def _point(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8, person=b"tripool-ring").digest(), "big")
