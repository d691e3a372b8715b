"""Goodput: what counts as served is what kept its promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench import Goodput
from tripool.errors import InvalidRequest

from .made_samples import made


def test_all_limits_hold_together():
    sample = made(events_s=[0.4, 0.44, 0.5], end_s=0.6)  # ttft 400, tpot 50, e2e 600
    assert Goodput.parse("ttft:400,tpot:50.01,e2e:600").keeps(sample)
    assert not Goodput.parse("ttft:399,tpot:60").keeps(sample)
    assert not Goodput.parse("ttft:500,tpot:49").keeps(sample)
    assert not Goodput.parse("e2e:599").keeps(sample)


def test_a_failed_request_is_never_good():
    assert not Goodput.parse("ttft:500").keeps(made(events_s=[0.1], error="timeout"))


def test_one_token_has_no_time_per_token():
    assert Goodput.parse("tpot:1").keeps(made(events_s=[0.4]))


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "ttft:inf", "ttft:nan", "p99:5"])
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(InvalidRequest, match="is no limit") as refused:
        Goodput.parse(text)
    assert "ttft:500,tpot:50" in refused.value.hint


def test_a_limit_may_be_given_once():
    with pytest.raises(InvalidRequest):
        Goodput.parse("ttft:5,ttft:6")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6), st.floats(0, 10), st.floats(0, 10))
def test_looser_limits_keep_more(limit, more, first_s, gap_s):
    sample = made(events_s=[first_s, first_s + gap_s])
    for metric in ("ttft", "tpot", "e2e"):
        strict, loose = Goodput(((metric, limit),)), Goodput(((metric, limit + more),))
        assert loose.keeps(sample) or not strict.keeps(sample)
