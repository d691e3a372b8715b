"""BlockPool against a naive model that keeps everything in plain dicts and searches instead of indexing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tripool.cache import BlockPool

KEYS = [bytes([letter]) for letter in b"abcd"]  # few, so that they meet


class NaivePool:
    """The rules in words: blank blocks are given out before remembered ones, the longest unused of those first."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.key: dict[int, bytes] = {}
        self.freed_at: dict[int, int] = {}
        self.clock = 0

    def free(self) -> list[int]:
        return [block for block, refs in self.refs.items() if refs == 0]

    def find(self, key: bytes) -> int | None:
        return next((block for block, name in self.key.items() if name == key), None)

    def match(self, keys: list[bytes]) -> list[int]:
        found: list[int] = []
        for key in keys:
            if (block := self.find(key)) is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    def give_out(self, blocks: list[int]) -> None:
        """Blocks the real pool chose: each must be allowed at its turn."""
        for block in blocks:
            assert self.refs[block] == 0, "gave out a held block"
            blank = [b for b in self.free() if b not in self.key]
            oldest = min(self.free(), key=lambda b: self.freed_at.get(b, 0))
            assert block in blank if blank else block == oldest, "forgot a block before its time"
            self.key.pop(block, None)
            self.refs[block] = 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            self.clock += 1
            self.freed_at[block] = self.clock

    def num_freed_by(self, tables: list[list[int]]) -> int:
        left = dict(self.refs)
        for block in (block for table in tables for block in table):
            left[block] -= 1
        return sum(refs > 0 and left[block] == 0 for block, refs in self.refs.items())

    def publish(self, block: int, key: bytes) -> None:
        if block not in self.key and self.find(key) is None:
            self.key[block] = key


class PoolMachine(RuleBasedStateMachine):
    """Owners hold tables of blocks, as sequences do; any of them may share, name, grow or leave."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.naive = NaivePool(num_blocks)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 4), keys=st.permutations(KEYS), num_named=st.integers(0, 4))
    def allocate(self, count: int, keys: list[bytes], num_named: int) -> None:
        assert self.pool.can_allocate(count) == (count <= len(self.naive.free()))
        if not self.pool.can_allocate(count):
            with pytest.raises(AssertionError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        self.naive.give_out(blocks)
        self.tables.append(blocks)
        self.name(blocks, keys[:num_named])

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True))
    def share(self, keys: list[bytes]) -> None:
        found = self.pool.match(keys)
        assert found == self.naive.match(keys)
        assert self.pool.num_idle(found) == sum(self.naive.refs[block] == 0 for block in found)
        self.pool.acquire(found)
        self.naive.hold(found)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), keys=st.permutations(KEYS))
    def publish(self, which: int, keys: list[bytes]) -> None:
        self.name(self.tables[which % len(self.tables)], keys)

    def name(self, blocks: list[int], keys: list[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=False):
            self.pool.publish(block, key)
            self.naive.publish(block, key)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        table = self.tables.pop(which % len(self.tables))
        self.pool.release(table)
        self.naive.release(table)

    @invariant()
    def agree(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.naive.free())
        assert self.pool.num_held + self.pool.num_free == self.pool.num_blocks
        for tables in (self.tables, self.tables[:1], self.tables[1:]):
            assert self.pool.num_freed_by(tables) == self.naive.num_freed_by(tables)
        for key in KEYS:
            block = self.naive.find(key)
            assert self.pool.match([key]) == ([] if block is None else [block])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.release(table)
            self.pool.check([])
            assert self.pool.num_held == 0


def run_machine(max_examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    options = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        phases=phases,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(PoolMachine, settings=options)


def test_agrees_with_the_naive_pool() -> None:
    run_machine(max_examples=100, steps=40)


@pytest.mark.prove
def test_agrees_with_the_naive_pool_at_length() -> None:
    run_machine(max_examples=2000, steps=100)


def forget_newest(pool: BlockPool) -> int:
    block, _ = pool._idle.popitem(last=True)
    del pool._block_of[pool._key_of.pop(block)]
    return block


def keep_the_name(pool: BlockPool) -> int:
    return pool._idle.popitem(last=False)[0]


def release_head_first(pool: BlockPool, blocks: list[int]) -> None:
    RELEASE(pool, blocks[::-1])


def release_but_stay_idle(pool: BlockPool, blocks: list[int]) -> None:
    """Forgets that blocks without a name have nothing to remember."""
    for block in reversed(blocks):
        pool._refs[block] -= 1
        if pool._refs[block] == 0:
            pool._idle[block] = None


def publish_twice(pool: BlockPool, block: int, key: bytes) -> None:
    assert pool._refs[block] > 0, "only a holder may publish"
    pool._block_of[key] = block
    pool._key_of[block] = key


def acquire_without_leaving_idle(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool._refs[block] += 1


RELEASE = BlockPool.release


@pytest.mark.parametrize(
    ("verb", "planted"),
    [
        ("_forget_oldest", forget_newest),
        ("_forget_oldest", keep_the_name),
        ("release", release_head_first),
        ("release", release_but_stay_idle),
        ("publish", publish_twice),
        ("acquire", acquire_without_leaving_idle),
    ],
)
def test_planted_bugs_are_caught(verb: str, planted: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, verb, planted)
    with pytest.raises((AssertionError, KeyError)):
        run_machine(max_examples=400, steps=40, phases=(Phase.generate,))


def test_a_prefix_outlives_its_tail() -> None:
    """Of a released table the tail is forgotten first: without its head it could never be found."""
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block, key in zip(table, KEYS, strict=False):
        pool.publish(block, key)
    pool.release(table)
    pool.allocate(1)
    assert pool.match(KEYS[:3]) == table[:2]
    pool.allocate(1)
    assert pool.match(KEYS[:3]) == table[:1]


def test_use_makes_young() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([second])
    pool.release([first])
    pool.acquire(pool.match([b"second"]))
    pool.release([second])
    assert pool.allocate(1) == [first]
    assert pool.match([b"second"]) == [second]


def test_only_a_holder_publishes() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="must be held"):
        pool.publish(0, b"key")


def test_a_block_released_too_often_is_noticed() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(table)


def test_check_wants_an_owner_for_every_reference() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.check([table])
    with pytest.raises(AssertionError, match="1 refs, 0 owners"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 refs, 2 owners"):
        pool.check([table, table])


def test_in_a_large_pool_a_new_sequence_starts_in_a_wide_gap() -> None:
    """Half as wide as the widest is enough there; a scattered pool still gives out all it has."""
    pool = BlockPool(4096)
    held = [pool.allocate(1)[0] for _ in range(64)]
    assert len(set(held)) == 64
    gaps = sorted(later - earlier - 1 for earlier, later in pairwise([-1, *sorted(held), 4096]))
    (new,) = pool.allocate(1)
    left, right = max(b for b in (-1, *held) if b < new), min(b for b in (4096, *held) if b > new)
    assert right - left - 1 >= gaps[-1] // 2
    rest = pool.allocate(pool.num_free)
    assert sorted([*held, new, *rest]) == list(range(4096)) and not pool.num_free


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=12), st.integers(1, 700))
def test_a_gap_is_found_where_its_bytes_are(runs: list[tuple[bool, int]], width: int) -> None:
    """Leaping from place to place finds what matching the bytes finds."""
    flags = b"".join(bytes([is_blank]) * length for is_blank, length in runs)
    pool = BlockPool(len(flags))
    pool._is_blank[:] = flags
    assert pool._first_gap(width) == flags.find(b"\1" * width)
