"""Orders of eviction against a plain list that is searched, and the rules that callers rely on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.cache.eviction import ATTENTION_BLOCKS, CostAware
from tripool.cache.records import Record, State

NUM_SLOTS = 40
SPACES = [b"a" * 16, b"b" * 16]
SUITE = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def record(slot: int, space: int = 0) -> Record:
    """Slots that follow one another are one chain; some are far down in it."""
    return Record(State.COMMITTED, bytes([slot]) * 16, SPACES[space], position=slot * (1 + 100 * (slot % 3 == 0)))


@dataclass
class Searched:
    """The same rules with lists: what is idle, since when, and how long each lives."""

    by_cost: bool
    idle: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)
    until: dict[int, float] = field(default_factory=dict)
    spaces: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    def enter(self, slots: list[int], space: int) -> None:
        at_least = 0.0
        self.clock += len(slots)
        for slot in slots:
            self.idle.append(slot)
            self.spaces[slot] = space
            self.uses[slot] = self.uses.get(slot, 0) + 1
            cost = (1 + record(slot).position / ATTENTION_BLOCKS) * min(self.uses[slot], 16) ** 0.5
            at_least = max(at_least, self.until.get(slot, 0.0), self.clock + 0.1 * NUM_SLOTS * cost)
            self.until[slot] = at_least

    def first(self, space: int | None) -> int | None:
        slots = [slot for slot in self.idle if space is None or self.spaces[slot] == space]
        return min(slots, key=lambda slot: self.until[slot] if self.by_cost else 0, default=None)


def new_order(by_cost: bool) -> CostAware:
    return CostAware(NUM_SLOTS, weight=0.1 if by_cost else 0.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "leave", "evict"]), st.integers(0, 36), st.integers(1, 4)),
    min_size=100,
    max_size=400,
)


@pytest.mark.parametrize("by_cost", [False, True])
@SUITE
@given(steps=STEPS)
def test_the_next_to_go_is_the_one_that_a_search_finds(by_cost: bool, steps: list[tuple[str, int, int]]) -> None:
    order, searched = new_order(by_cost), Searched(by_cost)
    for number, (what, start, count) in enumerate(steps):
        space = start // 19
        if what == "enter":
            slots = [slot for slot in range(start + count - 1, start - 1, -1) if slot // 19 == space]
            for slot in slots:
                if slot in order:  # used again
                    order.leave(slot)
                    searched.idle.remove(slot)
            order.enter([(slot, record(slot, space)) for slot in slots])
            searched.enter(slots, space)
        elif what == "leave" and start in order:
            order.leave(start)
            searched.idle.remove(start)
        elif what == "evict" and (goes := order.first(SPACES[space] if count % 2 else None)) is not None:
            order.leave(goes)
            order.forget(goes)
            searched.idle.remove(goes)
            del searched.uses[goes], searched.until[goes]
        assert order.first() == searched.first(None)
        for each in (0, 1):
            assert order.first(SPACES[each]) == searched.first(each)
        assert all((slot in order) == (slot in searched.idle) for slot in range(NUM_SLOTS))
        if number % 20 == 0:
            order.check({slot: record(slot, searched.spaces[slot]) for slot in searched.idle})


@pytest.mark.parametrize("by_cost", [False, True])
def test_no_head_goes_before_its_tail(by_cost: bool) -> None:
    order = new_order(by_cost)
    for _ in range(3):  # the head alone is used again and again, then all of it
        order.enter([(0, record(0))])
        order.leave(0)
    order.enter([(slot, record(slot)) for slot in reversed(range(10))])
    gone = []
    while (slot := order.first()) is not None:
        order.leave(slot)
        order.forget(slot)
        gone.append(slot)
    assert gone == list(reversed(range(10)))


def test_what_costs_more_and_what_is_used_more_lives_longer() -> None:
    order = CostAware(1000)
    late, early, often = (Record(State.COMMITTED, bytes(16), SPACES[0], position=at) for at in (2048, 0, 0))
    order.enter([(3, often)])
    for _ in range(8):
        order.leave(3)
        order.enter([(3, often)])
    order.enter([(1, late)])
    order.enter([(2, early)])
    assert order.first() == 2, "used last, but cheap and used once"
    order.leave(2)
    assert order.first() == 3


def test_memory_of_uses_ends_with_the_block() -> None:
    order = CostAware(1000)
    for _ in range(16):
        order.enter([(1, record(1))])
        order.leave(1)
    order.forget(1)
    order.enter([(1, record(1))])
    order.enter([(2, record(2))])
    assert order.first() == 1
