"""Token buckets hold a tenant to its rate, whatever it asks for and whenever."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission_model import tenant
from tripool.errors import RateLimited
from tripool.router.rate_limiter import Bucket, RateLimiter


def test_a_minute_at_once_and_then_the_rate() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", requests_per_minute=6)
    for _ in range(6):
        assert rate_limiter.wait_s(owner, 1, 0.0)[0] == 0
        rate_limiter.take(owner, 1, 1, 0.0)
    assert rate_limiter.wait_s(owner, 1, 0.0) == (pytest.approx(10.0), "requests")
    assert rate_limiter.wait_s(owner, 1, 4.0)[0] == pytest.approx(6.0)
    assert rate_limiter.wait_s(owner, 1, 10.0)[0] == 0


def test_the_answer_is_charged_and_the_cached_prompt_given_back() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=600)
    rate_limiter.take(owner, 1, 500, 0.0)
    assert rate_limiter.wait_s(owner, 200, 0.0) == (pytest.approx(10.0), "tokens")
    rate_limiter.take(owner, 0, -400, 0.0)
    assert rate_limiter.wait_s(owner, 200, 0.0)[0] == 0
    rate_limiter.take(owner, 0, 800, 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == pytest.approx(-300)
    assert rate_limiter.wait_s(owner, 1, 0.0)[0] == pytest.approx(30.1)


def test_more_than_a_minute_holds_never_fits() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=60)
    assert rate_limiter.wait_s(owner, 61, 0.0) == (inf, "tokens")
    assert rate_limiter.wait_s(owner, 60, 0.0)[0] == 0


def test_less_than_one_request_a_minute_is_one_now_and_then() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", requests_per_minute=0.5)
    assert rate_limiter.wait_s(owner, 0, 0.0)[0] == 0
    rate_limiter.take(owner, 1, 0, 0.0)
    assert rate_limiter.wait_s(owner, 0, 0.0)[0] == pytest.approx(120)


def test_tenants_do_not_share_and_without_limits_there_is_no_waiting() -> None:
    rate_limiter, one, two, free = (
        RateLimiter(),
        tenant("1", requests_per_minute=1),
        tenant("2", requests_per_minute=1),
        tenant("3"),
    )
    rate_limiter.take(one, 1, 0, 0.0)
    assert rate_limiter.wait_s(one, 1, 0.0)[0] > 0
    assert rate_limiter.wait_s(two, 1, 0.0)[0] == 0
    for _ in range(1000):
        rate_limiter.take(free, 1, 10_000, 0.0)
    assert rate_limiter.wait_s(free, 10_000, 0.0)[0] == 0


def test_a_new_limit_counts_at_once_and_what_was_used_stays_used() -> None:
    rate_limiter = RateLimiter()
    rate_limiter.take(tenant("a", requests_per_minute=10), 8, 0, 0.0)
    assert rate_limiter.wait_s(tenant("a", requests_per_minute=6), 1, 0.0)[0] == pytest.approx(30.0)
    assert rate_limiter.wait_s(tenant("a", requests_per_minute=60), 1, 0.0)[0] == 0
    assert rate_limiter.wait_s(tenant("a"), 1, 0.0)[0] == 0


steps = st.lists(
    st.tuples(st.floats(0, 30), st.floats(0.1, 200), st.floats(0, 1), st.floats(0, 300)), min_size=1, max_size=60
)


@given(per_minute=st.floats(1, 1000), steps=steps)
def test_no_stretch_of_time_brings_more_than_the_rate_and_a_minute(
    per_minute: float, steps: list[tuple[float, float, float, float]]
) -> None:
    """What goes through from any moment to any later one: the rate, the bucket, and the last one with its answer."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    used: list[tuple[float, float]] = []
    for pause_s, prompt, cached, answer in steps:
        now_s += pause_s
        wait_s = bucket.wait_s(prompt, now_s)
        assert (wait_s == inf) == (prompt > per_minute)
        if wait_s == inf:
            continue
        if wait_s > 0:
            # What it says is true: a little earlier is too early, and then it fits.
            assert bucket.wait_s(prompt, now_s + wait_s * 0.9) > 0
            assert bucket.wait_s(prompt, now_s + wait_s + 1e-6) == pytest.approx(0.0, abs=1e-5)
            continue
        bucket.take(prompt, now_s)
        bucket.take(-prompt * cached, now_s)
        bucket.take(answer, now_s)
        used.append((now_s, prompt * (1 - cached) + answer))
        assert bucket.level(now_s) <= per_minute
    for first in range(len(used)):
        total = 0.0
        for time_s, amount in used[first:]:
            # Everything before the last had to be paid before the last was let through.
            assert total <= per_minute + (time_s - used[first][0]) * per_minute / 60 + 1e-6 * per_minute
            total += amount


def test_reading_a_body_costs_a_little() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=1000)
    rate_limiter.read(owner, 2**21, 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 1000 - 2048
    refused = rate_limiter.refusal(owner, 1, 0, 0.0)
    assert isinstance(refused, RateLimited) and refused.retry_after_s == pytest.approx(1048 * 60 / 1000)
