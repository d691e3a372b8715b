"""Balance while serving: maps follow drifting loads, one copy per layer and step, and are valid at every step."""

from __future__ import annotations

import numpy as np

from tripool.experts import ExpertMap, imbalance
from tripool.experts.balancer import Balancer

LAYERS, EXPERTS, RANKS, TOP_K = 3, 32, 4, 4


def skewed(rng: np.random.Generator) -> np.ndarray:
    """(layers, experts) probabilities: one expert far above the others."""
    weights = rng.lognormal(0.0, 0.7, (LAYERS, EXPERTS))
    weights[np.arange(LAYERS), rng.integers(EXPERTS, size=LAYERS)] *= 8
    return weights / weights.sum(axis=1, keepdims=True)


def test_maps_follow_loads_one_copy_per_layer_and_step() -> None:
    rng = np.random.default_rng(5)
    current = ExpertMap.contiguous(LAYERS, EXPERTS, RANKS)
    balancer = Balancer(current, TOP_K)
    routed = np.zeros((LAYERS, EXPERTS), np.int64)
    for _ in range(3):  # popularity changes twice
        popular = skewed(rng)
        before = imbalance(current.table, popular).max()
        for _ in range(80):
            routed = routed + np.array([rng.multinomial(200 * TOP_K, layer) for layer in popular])
            copied = balancer.num_copies
            moved = balancer.step(routed, current)
            if moved is None:
                assert balancer.num_copies == copied
                continue
            moved.check()
            assert moved.epoch > current.epoch
            for old, new in zip(current.table, moved.table, strict=True):
                gained = {(r, e) for r in range(RANKS) for e in new[r]} - {(r, e) for r in range(RANKS) for e in old[r]}
                assert len([pair for pair in gained if pair[1] >= 0]) <= 1
            current = moved
        after = imbalance(current.table, popular).max()
        assert after < 1.15 < before
    assert balancer.num_copies > 0


def test_level_loads_move_nothing_and_an_idle_instance_neither() -> None:
    current = ExpertMap.contiguous(LAYERS, EXPERTS, RANKS)
    balancer = Balancer(current, TOP_K)
    routed = np.zeros((LAYERS, EXPERTS), np.int64)
    for _ in range(20):
        routed = routed + 500
        assert balancer.step(routed, current) is None
        assert balancer.step(routed, current) is None


def test_few_ranks_follow_drift_after_fewer_tokens() -> None:
    """Popularity is new after every 500 tokens: two ranks follow within the first half of them."""
    rng, current = np.random.default_rng(6), ExpertMap.contiguous(LAYERS, EXPERTS, 2)
    balancer, routed, values = Balancer(current, TOP_K), np.zeros((LAYERS, EXPERTS), np.int64), []
    for turn in range(40):
        if turn % 4 == 0:
            popular = rng.lognormal(0.0, 0.7, (LAYERS, EXPERTS))
            popular /= popular.sum(axis=1, keepdims=True)
        if turn % 4 >= 2:
            values.append(imbalance(current.table, popular).mean())
        routed = routed + np.array([rng.multinomial(125 * TOP_K, layer) for layer in popular])
        for _ in range(20):
            current = balancer.step(routed, current) or current
    assert np.mean(values) < 1.08


def test_a_plan_is_given_up_when_the_map_was_changed() -> None:
    current = ExpertMap.contiguous(LAYERS, EXPERTS, RANKS)
    balancer = Balancer(current, TOP_K)
    routed = np.ones((LAYERS, EXPERTS), np.int64)
    routed[:, 0] = 8000
    first = balancer.step(routed, current)
    assert first is not None
    balancer.reset()
    assert balancer.step(routed, first) is None, "nothing new was routed"


def test_ranks_without_experts_get_none() -> None:
    current = ExpertMap.contiguous(LAYERS, EXPERTS, RANKS, attention_only=[0, 2])
    balancer, rng = Balancer(current, TOP_K), np.random.default_rng(1)
    routed, popular = np.zeros((LAYERS, EXPERTS), np.int64), skewed(rng)
    for _ in range(60):
        routed = routed + np.array([rng.multinomial(200 * TOP_K, layer) for layer in popular])
        current = balancer.step(routed, current) or current
    assert balancer.num_copies > 0 and imbalance(current.table, popular).max() < 1.1
    assert (current.table[:, [0, 2]] == -1).all()
