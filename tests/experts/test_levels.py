"""Replica choice at dispatch: every row goes to a replica of its expert, and ranks stay level."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.experts import ExpertMap, balance, imbalance
from tripool.experts.levels import MEMORY_ROWS, SPLIT_ROWS, Levels


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=80)
def test_every_row_goes_to_a_replica(seed: int, ranks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    table = np.full((experts, ranks), -1, np.int32)
    for cell in table:
        some = np.sort(rng.permutation(ranks)[: rng.integers(1, ranks + 1)])
        cell[: len(some)] = some
    assigned = rng.integers(0, 5000, ranks)
    levels = Levels(int(rng.integers(ranks)), ranks)
    for _ in range(5):
        rows = rng.integers(0, 50, experts)
        taken = levels.choose(rows.tolist(), table, assigned)
        assert (taken.sum(axis=1) == rows).all() and not taken[table < 0].any()
        for rank in range(ranks):
            assigned[rank] += taken[table == rank].sum()


def test_few_rows_stay_together_and_many_are_split() -> None:
    table = np.array([[0, 1, 2]], np.int32)
    taken = Levels(1, 3).choose([SPLIT_ROWS], table, np.zeros(3, np.int64))
    assert taken.tolist() == [[0, SPLIT_ROWS, 0]], "ranks are level: its own replica"
    taken = Levels(0, 3).choose([3 * SPLIT_ROWS], table, np.array([0, 0, SPLIT_ROWS]))
    assert taken.tolist() == [[2 * SPLIT_ROWS, SPLIT_ROWS, 0]]


def test_what_lies_long_back_is_forgotten() -> None:
    """A rank that was away has been sent far fewer rows: it is not flooded when it comes back."""
    table, assigned = np.array([[0, 1]], np.int32), np.array([1_000_000, 0])
    levels, sent = Levels(0, 2), np.zeros(2, np.int64)
    for _ in range(40):
        taken = levels.choose([8], table, assigned)[0]
        assigned, sent = assigned + taken, sent + taken
    assert sent[1] - sent[0] <= 2 * MEMORY_ROWS + 8


def test_sources_together_level_what_each_alone_could_not() -> None:
    """Each of eight sources has a few rows at a time; after 1,000 tokens ranks are more level than by even shares."""
    ranks, experts, excess, even_excess = 8, 64, 0.0, 0.0
    for seed in range(4, 9):
        rng = np.random.default_rng(seed)
        popular = rng.lognormal(0, 0.7, (1, experts))
        popular /= popular.sum()
        placed = balance(popular, ranks, 1, 9)
        holders = ExpertMap(1, experts, placed).holders[0]
        routed, assigned = np.zeros((1, experts)), np.zeros(ranks, np.int64)
        sources = [Levels(source, ranks) for source in range(ranks)]
        for turn in range(1000):
            rows = rng.multinomial(8, popular[0])
            taken = sources[turn % ranks].choose(rows.tolist(), holders, assigned)
            np.add.at(assigned, holders[taken > 0], taken[taken > 0])
            routed += rows
        excess += assigned.max() / assigned.mean() - 1
        even_excess += float(imbalance(placed, routed)[0]) - 1
    assert excess < 0.7 * even_excess
