"""Moves between maps: one expert per layer and step, none ever lost, and the new placement in the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.errors import ExpertMapError
from tripool.experts import ExpertMap, MoveStep, balance, imbalance, least_imbalance, plan_moves
from tripool.experts.placement import EMPTY


def holders(table: npt.NDArray[np.int32]) -> list[list[list[int]]]:
    return [[sorted(rank[rank != EMPTY].tolist()) for rank in layer] for layer in table]


def check_steps(old: ExpertMap, steps: tuple[MoveStep, ...], budget: int, most: npt.NDArray[np.int64]) -> ExpertMap:
    """Every rule of moves; the last map."""
    before = old
    for step in steps:
        step.after.check()  # every expert of every layer has a replica
        assert step.after.epoch == before.epoch + 1
        assert len(step.copies) <= budget
        assert len({copy.layer for copy in step.copies}) == len(step.copies)
        came = step.after.table.copy()
        width = before.table.shape[2]
        held = np.pad(before.table, ((0, 0), (0, 0), (0, came.shape[2] - width)), constant_values=EMPTY)
        for copy in step.copies:
            assert held[copy.layer, copy.rank, copy.slot] == EMPTY  # free while the map before is in force
            assert copy.expert in held[copy.layer, copy.source]
            assert came[copy.layer, copy.rank, copy.slot] == copy.expert
            came[copy.layer, copy.rank, copy.slot] = EMPTY
        assert ((came == held) | (came == EMPTY)).all()  # all else stays in its slot or is dropped
        assert ((step.after.table != EMPTY).sum(axis=2) <= most + 1).all()
        before = step.after
    return before


@st.composite
def placements(draw: st.DrawFn) -> tuple[ExpertMap, ExpertMap]:
    ranks, layers, slots = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, ranks * slots))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    old, new = (
        ExpertMap(epoch, experts, balance(np.exp(rng.standard_normal((layers, experts))), ranks, 1, slots))
        for epoch in (3, 9)
    )
    return old, new


@given(placements(), st.integers(1, 4))
@settings(max_examples=200)
def test_moves_keep_every_rule_and_arrive(maps: tuple[ExpertMap, ExpertMap], budget: int) -> None:
    old, new = maps
    steps = plan_moves(old, new, budget)
    most = np.maximum((old.table != EMPTY).sum(axis=2), (new.table != EMPTY).sum(axis=2))
    last = check_steps(old, steps, budget, most)
    assert holders(last.table) == holders(new.table)
    lacking = sum(
        len(set(new_rank) - set(old_rank))
        for new_layer, old_layer in zip(holders(new.table), holders(old.table), strict=True)
        for new_rank, old_rank in zip(new_layer, old_layer, strict=True)
    )
    assert sum(len(step.copies) for step in steps) == lacking  # no copy in vain
    assert plan_moves(last, new, budget) == ()


def test_two_full_ranks_exchange_their_only_replicas() -> None:
    old = ExpertMap(0, 4, np.array([[[0, 1], [2, 3]]], np.int32))
    new = ExpertMap(0, 4, np.array([[[0, 3], [2, 1]]], np.int32))
    steps = plan_moves(old, new, 1)
    last = check_steps(old, steps, 1, np.array([[2, 2]]))
    assert len(steps) == 2 and holders(last.table) == [[[0, 3], [1, 2]]]


def test_layers_that_gain_little_stay_and_those_that_gain_most_come_first() -> None:
    loads = np.array([[2.0, 2.0, 2.02, 2.0], [4.0, 4.0, 1.0, 1.0], [8.0, 8.0, 1.0, 1.0]])
    old = ExpertMap.contiguous(3, 4, 2)
    new = old.replaced(balance(loads, 2, 1, 2))
    steps = plan_moves(old, new, 1, loads=loads)
    layers = [copy.layer for step in steps for copy in step.copies]
    assert layers[0] == 2 and 0 not in layers
    assert imbalance(steps[-1].after.table, loads)[1:] == pytest.approx([1.0, 1.0])
    assert plan_moves(old, new, 1, loads=loads, min_gain=2.0) == ()


def test_a_layer_whose_busiest_rank_alone_gains_moves() -> None:
    """One slot per rank: what is taken off the busiest rank, another one has more."""
    loads = np.array([[2.4, 2.035, 0.28, 0.285]])
    old = ExpertMap(0, 4, np.array([[[0], [1], [1], [2], [3]]], np.int32))
    new = old.replaced(balance(loads, 5, 1, 1, old=old.table))
    steps = plan_moves(old, new, 1, loads=loads)
    assert imbalance(old.table, loads) == pytest.approx([2.4])
    assert imbalance(steps[-1].after.table, loads) == pytest.approx([2.035]) == least_imbalance(loads, [1] * 5)


def test_a_rank_comes_back_and_gets_experts_again() -> None:
    loads = np.ones((2, 8))
    held = ExpertMap.contiguous(2, 8, 4).without(1).returned(1)
    new = held.replaced(balance(loads, 4, 2, 2, old=held.table))
    last = check_steps(held, plan_moves(held, new, 2, loads=loads), 2, np.full((2, 4), 3))
    assert imbalance(last.table, loads) == pytest.approx([1.0, 1.0])
    level = ExpertMap.contiguous(2, 12, 4).without(1).returned(1)  # three ranks of four experts: level, and yet worse
    new = level.replaced(balance(np.ones((2, 12)), 4, 2, 3, old=level.table))
    assert plan_moves(level, new, 2, loads=np.ones((2, 12)))


def test_maps_of_other_shapes_are_refused() -> None:
    old = ExpertMap.contiguous(1, 4, 2)
    for new in (ExpertMap.contiguous(2, 4, 2), ExpertMap.contiguous(1, 4, 3), old.without(0)):
        with pytest.raises(ExpertMapError):
            plan_moves(old, new, 1)
