"""SLO classes in virtual time: met, and at more throughput than any fixed batch limit that meets them."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest

from bench.slo_classes import KEPT, MIXES, Kind, StepCost, best_fixed, draw, run
from tripool.config import AdmissionConfig, SchedulerConfig
from tripool.router.admission import AdmissionController
from tripool.simulate.rng import Rng

COUNT = 250
NOISY = StepCost(jitter=0.05, hiccup=0.001)


def config(max_running: int = 96, step_tokens: int = 512) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=4096, max_running=max_running, step_tokens=max(step_tokens, max_running + 1), prefix_reuse=False
    )


@pytest.mark.parametrize("mix", MIXES)
def test_every_class_is_kept_at_a_tenth_more_throughput_than_the_best_fixed_limit(mix: str) -> None:
    backlog = draw(MIXES[mix], COUNT, Rng(1))
    ours = run(backlog, config(), NOISY)
    assert ours.worst >= KEPT, ours.attainment()
    _, best = best_fixed(backlog, [config(limit) for limit in range(6, 13)], NOISY)
    assert best is not None
    assert ours.tokens_per_s >= 1.1 * best.tokens_per_s
    too_many = run(backlog, config(16), NOISY, promised=False)
    assert too_many.worst < 0.5, "the sweep must have gone past what the classes bear"


def test_at_four_fifths_of_capacity_everyone_is_kept_and_begun_in_time() -> None:
    phases = MIXES["shifting"]
    capacity = run(draw(phases, COUNT, Rng(1)), config(), NOISY)
    per_s = 0.8 * len(capacity.served) / capacity.wall_s
    done = run(draw(phases, COUNT, Rng(2), per_s=per_s), config(), NOISY)
    assert done.worst >= KEPT and done.in_time() >= KEPT


def test_at_twice_the_capacity_admission_refuses_and_the_rest_is_kept() -> None:
    phases = MIXES["shifting"]
    done = run(
        draw(phases, COUNT, Rng(3), per_s=14.0), config(), NOISY, admission=AdmissionController(AdmissionConfig())
    )
    assert len(done.refused_s) > COUNT // 5
    assert done.worst >= KEPT, done.attainment()


def test_what_was_not_promised_takes_what_is_left() -> None:
    """A flood without a promise beside a few strict answers: these are kept, and all of the flood is answered."""
    strict = Kind(tpot_ms=15.0, share=0.1, prompt_tokens=100, answer_tokens=60)
    flood = Kind(tpot_ms=None, share=0.9, prompt_tokens=600, answer_tokens=100)
    backlog = draw([[strict, flood]], 150, Rng(4))
    done = run(backlog, config(), NOISY)
    assert done.worst >= KEPT and len(done.served) == 150


@pytest.mark.prove
def test_the_same_with_other_seeds_and_a_rougher_machine() -> None:
    """Steps vary by 10 % and some take far longer: two answers of 175 may miss the tightest class, and the best fixed
    limit, which is found by trying all of them on the same requests, comes nearer in single cases."""
    cost, kept, gains = StepCost(jitter=0.1, hiccup=0.002), [], []
    for seed, mix in product(range(4), MIXES):
        backlog = draw(MIXES[mix], 800, Rng(100 + seed))
        ours = run(backlog, config(), cost, seed=seed)
        _, best = best_fixed(backlog, [config(limit) for limit in range(5, 14)], cost)
        assert best is not None
        kept.append(ours.worst)
        gains.append(ours.tokens_per_s / best.tokens_per_s)
    assert min(kept) >= 0.985 and fmean(kept) >= KEPT, kept
    assert min(gains) >= 1.0 and fmean(gains) >= 1.1, gains
