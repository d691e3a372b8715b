"""What is learned about a backend's speed, and how far it is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.router.ttft_predictor import Line, Trust, TtftPredictor


@given(per_request=st.floats(0, 1), per_token=st.floats(0, 0.1), sizes=st.lists(st.integers(1, 4000), max_size=20))
def test_a_line_is_found_again(per_request: float, per_token: float, sizes: list[int]) -> None:
    line = Line()
    for size in [*sizes, 10, 4000]:
        line.learn(size, per_request + per_token * size)
    for size in (10, 500, 4000):
        assert line.seconds_for(1, size) == pytest.approx(per_request + per_token * size, rel=1e-3, abs=1e-6)


def test_overhead_and_tokens_are_separated() -> None:
    line = Line()
    for size in (10, 1000, 50, 400, 2000, 5):
        line.learn(size, 0.02 + size / 1000)
    assert line.fit() == (pytest.approx(0.02, rel=1e-6), pytest.approx(0.001, rel=1e-6))
    assert line.seconds_for(3, 600) == pytest.approx(0.66)


def test_nothing_known_predicts_nothing() -> None:
    predictor = TtftPredictor()
    assert predictor.predict_s(10, 1000, 10, 0.0) is None and predictor.tokens_per_s() is None
    for now_s in range(3):
        predictor.first_token(100, 0.5, float(now_s), unhindered=True)
    assert predictor.predict_s(0, 0, 100, 9.0) == pytest.approx(0.5)


def test_only_a_full_backend_teaches_the_queue_line() -> None:
    predictor, now_s = TtftPredictor(), 0.0
    for _ in range(20):
        predictor.full(True, now_s)
        now_s += 0.1
        predictor.first_token(100, 0.1, now_s, unhindered=False)
        predictor.full(False, now_s)
        now_s += 5.0
    assert predictor.tokens_per_s() == pytest.approx(1000)
    assert predictor.predict_s(4, 400, 100, now_s) == pytest.approx(0.5)


def test_what_is_under_way_is_partly_done() -> None:
    predictor = TtftPredictor()
    predictor.full(True, 0.0)
    for number in range(10):
        predictor.first_token(100, 1.0, number + 1.0, unhindered=False)
    assert predictor.predict_s(2, 200, 100, 10.0) == pytest.approx(3.0)
    assert predictor.predict_s(2, 200, 100, 10.4) == pytest.approx(2.6)
    assert predictor.predict_s(2, 200, 100, 99.0) == pytest.approx(2.0), "at most its own turn"


def test_an_outdated_slow_fit_is_corrected_by_an_unhindered_request() -> None:
    predictor = TtftPredictor()
    predictor.full(True, 0.0)
    for number in range(50):
        predictor.first_token(100, 10.0, 10.0 * (number + 1), unhindered=False)
    predictor.full(False, 500.0)
    slow_s = predictor.predict_s(1, 100, 100, 999.0)
    assert slow_s == pytest.approx(20.0)
    for number in range(200):
        predictor.first_token(100, 0.1, 501.0 + number, unhindered=True)
    quick_s = predictor.predict_s(1, 100, 100, 999.0)
    assert quick_s is not None and quick_s < 1.0


def test_trust_falls_with_error_and_comes_back() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(50):
        trust.learn(1.0, 2.0)
    late = trust.factor
    assert late >= 1.9
    for number in range(1000):
        trust.learn(1.0, 1.0 + 0.01 * (number % 2))
    assert trust.factor < 1.1
    for _ in range(200):
        trust.learn(1.0, 0.0)
    assert trust.factor >= 0.5


def test_short_predictions_do_not_spoil_the_trust_in_long_ones() -> None:
    trust = Trust()
    for _ in range(300):
        trust.learn(1.0, 1.0)
        trust.learn(0.001, 0.010)
    assert trust.factor < 1.1
