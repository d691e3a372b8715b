"""Canaries decide in time, cost no more errors than their bar, and keep conversations on one side."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.control.canary import Canary, CanaryPlan
from tripool.errors import InvalidRequest


def canary(**plan: float) -> Canary:
    given = {"requests": 50, "min_requests": 10, "seconds": 100.0, "max_slowdown": 0.0}
    return Canary(CanaryPlan(**(given | plan)), "story@2", 0.0)  # type: ignore[arg-type]


def feed(one: Canary, new: int, failed: int = 0, *, old: int = 0, old_failed: int = 0, **times: float) -> Canary:
    for i in range(new):
        one.ended(is_new=True, failed=i < failed, **times)
    for i in range(old):
        one.ended(is_new=False, failed=i < old_failed)
    return one


@settings(max_examples=20)
@given(st.floats(0.05, 0.95), st.integers(0, 2**32))
def test_the_share_is_kept_and_a_conversation_stays(share: float, seed: int) -> None:
    one, same = (Canary(CanaryPlan(share=share), "story@2", now_s) for now_s in (0.0, 7.0))
    conversations = [f"{seed} {i}".encode() for i in range(1000)]
    taken = [one.takes(each) for each in conversations]
    assert taken == [same.takes(each) for each in conversations]
    assert abs(sum(taken) / 1000 - share) < 0.08
    other = Canary(CanaryPlan(share=share), "story@3", 0.0)
    assert [other.takes(each) for each in conversations] != taken


@given(st.lists(st.booleans(), max_size=200), st.floats(0, 0.5), st.integers(1, 100))
def test_a_failing_version_never_costs_more_than_its_bar_and_one_request(
    failures: list[bool], bar: float, requests: int
) -> None:
    one = canary(max_error_rate=bar, requests=requests, min_requests=1)
    failed = 0
    for fails in failures:
        verdict = one.verdict(1.0)
        if verdict is not None:
            assert verdict.publish is (one.new.error_rate <= bar)
            break
        failed += fails
        one.ended(is_new=True, failed=fails)
    assert failed <= bar * requests + 1
    assert one.verdict(100.0) is not None, "the time is over"


def test_it_is_published_after_enough_requests_without_errors() -> None:
    assert feed(canary(), 49).verdict(99.9) is None
    verdict = feed(canary(), 50).verdict(1.0)
    assert verdict is not None and verdict.publish


def test_time_decides_only_where_enough_is_known() -> None:
    for requests, publish in ((9, False), (10, True)):
        verdict = feed(canary(), requests).verdict(100.0)
        assert verdict is not None and verdict.publish is publish
    few = feed(canary(), 9).verdict(100.0)
    assert few is not None and "only 9 requests" in few.reason


def test_what_fails_beside_it_too_does_not_count_against_it() -> None:
    verdict = feed(canary(), 50, 10, old=100, old_failed=25).verdict(1.0)
    assert verdict is not None and verdict.publish
    verdict = feed(canary(), 50, 10, old=100, old_failed=1).verdict(1.0)
    assert verdict is not None and not verdict.publish and "failed" in verdict.reason


def test_objectives() -> None:
    kept = feed(canary(ttft_ms=100, tpot_ms=20), 50, ttft_ms=90.0, tpot_ms=19.0).verdict(1.0)
    assert kept is not None and kept.publish
    missed = feed(canary(ttft_ms=100, tpot_ms=20), 50, ttft_ms=90.0, tpot_ms=21.0).verdict(1.0)
    assert missed is not None and not missed.publish and "tpot_ms 20" in missed.reason and "ttft" not in missed.reason


def test_it_may_not_be_much_slower_than_the_version_beside_it() -> None:
    one = canary(max_slowdown=1.5)
    for _ in range(50):
        one.ended(is_new=True, failed=False, tpot_ms=16.0, ttft_ms=1.0)
        one.ended(is_new=False, failed=False, tpot_ms=10.0, ttft_ms=1.0)
    verdict = one.verdict(1.0)
    assert verdict is not None and not verdict.publish and "1.5 times 10" in verdict.reason


@pytest.mark.parametrize(
    "wrong",
    [{"share": 0.0}, {"share": 1.0}, {"requests": 0}, {"min_requests": 51}, {"seconds": 0.0}, {"ttft_ms": -1.0}],
)
def test_a_plan_that_cannot_be_kept_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        canary(**wrong)
    assert refused.value.param == next(iter(wrong))
