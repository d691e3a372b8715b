"""Who keeps what: evenly, together by segments, and without moving when others come and go."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from tripool.cache import Ring
from tripool.cache.ring import SEGMENT_BLOCKS

KEYS = [blake2b(n.to_bytes(4, "big"), digest_size=16).digest() for n in range(4000)]
NAMES = st.sets(st.integers(0, 50).map("cache-{}".format), min_size=1, max_size=8)


@given(members=NAMES, newcomer=st.integers(100, 120).map("cache-{}".format))
def test_a_newcomer_takes_its_share_and_nothing_else_moves(members: set[str], newcomer: str) -> None:
    before, after = Ring(members), Ring(members | {newcomer})
    moved = {key for key in KEYS[:500] if before.owner(key) != after.owner(key)}
    assert all(after.owner(key) == newcomer for key in moved)
    assert Ring(after.members[::-1]).owner(KEYS[0]) == after.owner(KEYS[0])


def test_shares_are_even() -> None:
    ring = Ring(f"cache-{n}" for n in range(8))
    counts = Counter(map(ring.owner, KEYS))
    assert len(counts) == 8 and max(counts.values()) < 1.5 * len(KEYS) / 8 < 3 * min(counts.values())


@given(members=NAMES, length=st.integers(0, 70), first=st.integers(0, 70))
def test_stretches_cover_the_chain_once_and_keep_segments_whole(members: set[str], length: int, first: int) -> None:
    ring, keys = Ring(members), KEYS[:length]
    stretches = ring.member_ranges(keys, first)
    covered = [position for stretch in stretches for position in range(stretch.start, stretch.stop)]
    assert covered == list(range(first, length))
    for stretch in stretches:
        for position in range(stretch.start, stretch.stop):
            assert ring.owner(keys[position - position % SEGMENT_BLOCKS]) == stretch.member


def test_where_a_block_lives_does_not_depend_on_where_the_question_begins() -> None:
    ring = Ring(["a", "b", "c"])
    whole = {p: s.member for s in ring.member_ranges(KEYS[:100]) for p in range(s.start, s.stop)}
    for first in (1, 15, 16, 17, 99):
        part = {p: s.member for s in ring.member_ranges(KEYS[:100], first) for p in range(s.start, s.stop)}
        assert part == {p: member for p, member in whole.items() if p >= first}


@given(members=st.sets(st.integers(0, 50).map("cache-{}".format), min_size=2, max_size=8), lost=st.integers(1, 3))
def test_the_next_owner_is_the_owner_once_others_are_gone(members: set[str], lost: int) -> None:
    ring, gone = Ring(members), set(sorted(members)[:lost])
    rest = Ring(members - gone)
    for key in KEYS[:100]:
        assert ring.next_owner(key, gone) == (rest.owner(key) if rest.members else None)
