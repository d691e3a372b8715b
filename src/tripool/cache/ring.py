"""Which member keeps which block: consistent hashing, so that members come and go and most blocks stay. Pure.

Blocks are placed by segments: `SEGMENT_BLOCKS` blocks of a chain that follow one another live together, under the key
of the first of them. Block by block, the loss of one member of N would cut every chain after about N blocks, and each
look-up would ask everybody. Chain by chain, all prompts that begin alike would live with one member, and it would
answer for the whole pool. With segments a short prompt asks one member, a long one several at once, and a popular
beginning is spread after its first segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

SEGMENT_BLOCKS = 16
_POINTS = 128
"""Places of one member on the ring: its share of the keys is then even within a few tens of percent."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions `start` to `stop` (not included) of a chain, all with one member."""

    member: str
    start: int
    stop: int


class Ring:
    def __init__(self, members: Iterable[str]) -> None:
        self.members = tuple(sorted(set(members)))
        points = sorted((_place(f"{member}#{n}".encode()), member) for member in self.members for n in range(_POINTS))
        self._places = [place for place, _ in points]
        self._owners = [member for _, member in points]

    def owner(self, key: bytes) -> str:
        """The member whose point follows the key's."""
        assert self.members, "an empty ring owns nothing"
        if len(self.members) == 1:
            return self.members[0]
        return self._owners[bisect_right(self._places, _place(key)) % len(self._owners)]

    def stretches(self, keys: Sequence[bytes], first: int = 0) -> list[Stretch]:
        """Where the blocks of a chain live, from position `first` on. `keys` is the chain from its first block."""
        if len(self.members) == 1:
            return [Stretch(self.members[0], first, len(keys))] if first < len(keys) else []
        found: list[Stretch] = []
        for start in range(first - first % SEGMENT_BLOCKS, len(keys), SEGMENT_BLOCKS):
            member, stop = self.owner(keys[start]), min(start + SEGMENT_BLOCKS, len(keys))
            if found and found[-1].member == member:
                found[-1] = Stretch(member, found[-1].start, stop)
            else:
                found.append(Stretch(member, max(start, first), stop))
        return found


def _place(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8, person=b"tripool-ring").digest(), "big")
