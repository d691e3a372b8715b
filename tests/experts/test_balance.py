"""Replica placement: valid for any loads and slots, optimal with one slot per rank, near its lower bound."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.errors import ExpertMapError
from tripool.experts import ExpertMap, balance, imbalance, least_imbalance
from tripool.experts.balance import replicas_by_load
from tripool.experts.placement import EMPTY, expert_ranks, rank_loads, replica_counts

Loads = npt.NDArray[np.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Loads, int, int, list[int]]:
    """Loads, ranks, hosts, slots per rank: uneven slots, ranks without any, loads of 0."""
    ranks = draw(st.integers(1, 9))
    hosts = draw(st.integers(1, ranks))
    slots = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(any))
    experts = draw(st.integers(1, sum(slots)))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    loads = np.exp(draw(st.sampled_from([0.0, 0.5, 2.0])) * rng.standard_normal((layers, experts)))
    loads[rng.random(loads.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    return loads, ranks, hosts, slots


def skewed(seed: int, layers: int, experts: int) -> Loads:
    loads = np.exp(0.7 * np.random.default_rng(seed).standard_normal((layers, experts)))
    loads[np.arange(layers), np.arange(layers) % experts] = 30 * loads.mean(axis=1)
    return loads


@given(problems())
@settings(max_examples=150)
def test_any_placement_is_valid_and_not_below_the_bound(problem: tuple[Loads, int, int, list[int]]) -> None:
    loads, ranks, hosts, slots = problem
    table = balance(loads, ranks, hosts, slots)
    ExpertMap(0, loads.shape[1], table).check()  # every expert somewhere, none twice on a rank
    assert ((table != EMPTY).sum(axis=2) <= slots).all()
    if expert_ranks(table).sum() == np.count_nonzero(slots):  # else the mean is over other ranks
        assert (imbalance(table, loads) >= least_imbalance(loads, slots) - 1e-6).all()


@given(problems(), st.integers(0, 99))
@settings(max_examples=100)
def test_an_old_placement_is_changed_into_a_valid_one(problem: tuple[Loads, int, int, list[int]], seed: int) -> None:
    loads, ranks, hosts, slots = problem
    shuffled = np.random.default_rng(seed).permuted(loads, axis=1)
    old = balance(shuffled, ranks, hosts, slots)
    for copies in (None, 4):
        table = balance(loads, ranks, hosts, slots, old=old, copies=copies)
        ExpertMap(0, loads.shape[1], table).check()
        assert ((table != EMPTY).sum(axis=2) <= slots).all()
        for after, before in zip(table.tolist(), old.tolist(), strict=True):
            pairs = zip(after, before, strict=True)
            changed = sum(len(set(now) - set(then) - {EMPTY}) for now, then in pairs)
            assert copies is None or changed <= copies


@given(problems())
@settings(max_examples=50)
def test_the_replicas_are_those_of_one_greedy_choice_after_the_other(
    problem: tuple[Loads, int, int, list[int]],
) -> None:
    loads, _, _, slots = problem
    loads, most = loads + 0.01, np.count_nonzero(slots)
    counts = replicas_by_load(loads, sum(slots), most)
    for layer, weights in enumerate(loads):
        plain = [1] * len(weights)
        while sum(plain) < min(sum(slots), len(weights) * most):
            room = [index for index in range(len(weights)) if plain[index] < most]
            plain[max(room, key=lambda index: weights[index] / plain[index])] += 1
        assert sorted(weights / plain) == pytest.approx(sorted(weights / counts[layer]))


def best_of_all(weights: npt.NDArray[np.float64], slots: list[int]) -> float:
    """The least maximum of any placement, by trying all."""
    experts = range(len(weights))
    choices = [[held for size in range(room + 1) for held in combinations(experts, size)] for room in slots]
    best = np.inf
    for held in product(*choices):
        counts = np.bincount([expert for each in held for expert in each], minlength=len(weights))
        if counts.all():
            best = min(best, max(sum(weights[e] / counts[e] for e in each) for each in held))
    return float(best / (weights.sum() / len(slots)))


@pytest.mark.parametrize("slots", [[2, 2, 2], [1, 1, 1, 1], [3, 3], [2, 2, 1]])
def test_the_bound_and_the_placement_beside_all_placements(slots: list[int]) -> None:
    rng = np.random.default_rng(1)
    for experts in range(2, sum(slots) + 1):
        loads = np.exp(1.2 * rng.standard_normal((4, experts)))
        reached = imbalance(balance(loads, len(slots), 1, slots), loads)
        for layer, weights in enumerate(loads):
            best = best_of_all(weights, slots)
            assert least_imbalance(loads, slots)[layer] <= best + 1e-6
            if max(slots) == 1:
                assert reached[layer] == pytest.approx(best)  # one slot per rank: the optimum
                assert least_imbalance(loads, slots)[layer] == pytest.approx(best)


@pytest.mark.parametrize(("experts", "ranks", "hosts", "slots"), [(256, 32, 4, 9), (64, 8, 1, 9), (256, 8, 2, 36)])
def test_many_slots_come_near_the_bound(experts: int, ranks: int, hosts: int, slots: int) -> None:
    loads = skewed(3, 8, experts)
    reached = imbalance(balance(loads, ranks, hosts, slots), loads)
    assert (reached <= 1.03 * least_imbalance(loads, [slots] * ranks)).all()


def test_ep320_is_optimal_in_one_slot_per_rank() -> None:
    loads, slots = skewed(4, 4, 256), ([1] * 9 + [0]) * 32
    table = balance(loads, 320, 20, slots)
    assert imbalance(table, loads) == pytest.approx(least_imbalance(loads, slots))
    assert not expert_ranks(table)[9::10].any()


def test_replicas_are_spread_over_hosts() -> None:
    loads = skewed(5, 6, 32)
    table = balance(loads, 8, 4, 5)
    hosts = table.reshape(6, 4, -1)
    for layer, counts in enumerate(replica_counts(table, 32)):
        for expert in np.nonzero(counts > 1)[0]:
            on_hosts = (hosts[layer] == expert).sum(axis=1)
            assert on_hosts.max() <= -(-counts[expert] // 4) + 1
            assert (on_hosts > 0).sum() > 1


def test_a_small_change_of_loads_changes_little() -> None:
    loads = skewed(6, 8, 256)
    old = balance(loads, 32, 4, 9)
    drifted = loads * np.exp(0.1 * np.random.default_rng(7).standard_normal(loads.shape))
    kept, fresh = balance(drifted, 32, 4, 9, old=old), balance(drifted, 32, 4, 9)

    def copies(new: npt.NDArray[np.int32]) -> int:
        pairs = zip(new.reshape(-1, 9).tolist(), old.reshape(-1, 9).tolist(), strict=True)
        return sum(len(set(after) - set(before)) for after, before in pairs)

    assert copies(kept) < copies(fresh) / 3
    assert (imbalance(kept, drifted) <= 1.03 * least_imbalance(drifted, [9] * 32)).all()


def test_the_load_of_an_expert_is_divided_among_its_replicas() -> None:
    table = np.array([[[0, 1], [0, EMPTY], [2, 0]]], np.int32)
    assert rank_loads(table, np.array([[6.0, 1.0, 4.0]])).tolist() == [[3.0, 2.0, 6.0]]
    assert imbalance(table, np.array([[6.0, 1.0, 4.0]])).tolist() == pytest.approx([6 / (11 / 3)])


@pytest.mark.parametrize(
    ("loads", "slots"),
    [([[1.0, 1.0, 1.0]], [1, 1]), ([[1.0, -1.0]], [2]), ([[1.0, float("nan")]], [2]), ([1.0, 1.0], [2])],
)
def test_what_cannot_be_placed_is_an_error(loads: list[list[float]], slots: list[int]) -> None:
    with pytest.raises(ExpertMapError):
        balance(loads, len(slots), 1, slots)
