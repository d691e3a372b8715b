"""The learning rate: up in warm-up, down to its final share at the end, by steps or by time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.train.plan import Optimise, balance_rate, learning_rate, progress_by_time


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["cosine", "linear"]), st.integers(0, 50))
def test_after_the_warm_up_it_only_falls_to_the_final_share(a: float, b: float, decay: str, warmup_steps: int) -> None:
    plan = Optimise(decay=decay, warmup_steps=warmup_steps)
    early, late = (learning_rate(plan, warmup_steps, progress) for progress in sorted((a, b)))
    assert plan.peak_lr >= early >= late >= plan.peak_lr * plan.final_lr_share * 0.999
    assert learning_rate(plan, warmup_steps, 1.0) == pytest.approx(plan.peak_lr * plan.final_lr_share)


def test_the_warm_up_rises_by_equal_steps() -> None:
    plan = Optimise(warmup_steps=4, peak_lr=1e-3)
    assert [learning_rate(plan, step, 0.0) for step in range(6)] == pytest.approx(
        [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]
    )


def test_biases_move_in_full_from_the_first_step_and_little_at_the_end() -> None:
    plan = Optimise(bias_rate=0.01, final_lr_share=0.1, warmup_steps=100)
    assert balance_rate(plan, 0.0) == pytest.approx(0.01)
    assert balance_rate(plan, 1.0) == pytest.approx(0.001)


def test_time_left_is_spread_over_what_is_left_of_the_schedule() -> None:
    assert progress_by_time(10.0, 10.0, 20.0) == 0.0
    assert progress_by_time(15.0, 10.0, 20.0) == 0.5
    assert progress_by_time(15.0, 10.0, 20.0, before=0.6) == pytest.approx(0.8)
    assert progress_by_time(99.0, 10.0, 20.0, before=0.6) == 1.0
    assert progress_by_time(10.0, 10.0, 9.0) == 1.0
