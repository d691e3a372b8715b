"""Shots: shared blocks stay shared at any scale, and arrivals are a Poisson process."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench.prompts import ORDINARY_IDS, TokenPrompts
from tripool.bench.trace import TraceRequest
from tripool.bench.workload import at_times, poisson_arrivals, random_shots, trace_shots, without_times


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that share prefixes, as conversations do; some hash full blocks only."""
    requests = []
    for index in range(draw(st.integers(1, 6))):
        shared = draw(st.integers(0, 3))
        rest, full_only = draw(st.integers(1, 16)), draw(st.booleans())
        ids = [*range(shared), 100 + index]
        if full_only and rest < 16 and len(ids) > 1:
            ids = ids[:-1]
            requests.append(TraceRequest(index * 1.0, 16 * len(ids) + rest, 10, tuple(ids), block_tokens=16))
        else:
            requests.append(TraceRequest(index * 1.0, 16 * (len(ids) - 1) + rest, 10, tuple(ids), block_tokens=16))
    return requests


@settings(max_examples=60, derandomize=True, deadline=None)
@given(traces())
def test_lengths_are_the_traces(requests):
    shots = trace_shots(requests)
    assert [shot.input_tokens for shot in shots] == [request.input_tokens for request in requests]
    assert [shot.due_s for shot in shots] == [request.arrival_s for request in requests]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(traces(), st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0, 2.0]))
def test_what_was_shared_stays_shared(requests, scale):
    prompts = TokenPrompts(ORDINARY_IDS, 0)
    shots = trace_shots(requests, scale_tokens=scale)
    ids = [prompts.ids(shot.pieces) for shot in shots]
    block = max(1, round(16 * scale))
    for one, two in ((a, b) for a in range(len(requests)) for b in range(a)):
        pairs = zip(requests[one].block_ids, requests[two].block_ids, strict=False)
        same = next((k for k, (a, b) in enumerate(pairs) if a != b), 0)
        length = min(same * block, len(ids[one]), len(ids[two]))
        assert ids[one][:length] == ids[two][:length]
    for request, shot in zip(requests, shots, strict=True):
        assert shot.input_tokens >= 1 and shot.output_tokens >= 1
        assert abs(shot.input_tokens - request.input_tokens * scale) <= len(request.block_ids) + 1


def test_a_prompt_without_ids_has_its_whole_length():
    (shot,) = trace_shots([TraceRequest(0.0, 3000, 5)], scale_tokens=0.5)
    assert shot.input_tokens == 1500


def test_speed_divides_times():
    requests = [TraceRequest(float(second), 5, 5, (second,)) for second in range(3)]
    assert [shot.due_s for shot in trace_shots(requests, speed=4)] == [0.0, 0.25, 0.5]


def test_made_up_prompts_share_nothing():
    shots = random_shots(50, input_tokens=20, output_tokens=3)
    prompts = TokenPrompts(ORDINARY_IDS, 0)
    assert {len(prompts.ids(shot.pieces)) for shot in shots} == {20}
    assert len({tuple(prompts.ids(shot.pieces))[:4] for shot in shots}) == 50
    assert all(shot.due_s is None and shot.output_tokens == 3 for shot in shots)


def test_times_are_put_on_and_taken_off():
    shots = at_times(random_shots(2, input_tokens=1, output_tokens=1), [0.5, 1.5])
    assert [shot.due_s for shot in shots] == [0.5, 1.5]
    assert [shot.due_s for shot in without_times(shots)] == [None, None]


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson(rate):
    times = poisson_arrivals(20_000, rate=rate, seed=1)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / rate, rel=0.03)
    # What makes it Poisson and not merely random: the spread equals the mean, and e**-1 of the gaps are above it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)


def test_poisson_repeats_by_seed():
    assert poisson_arrivals(5, rate=2, seed=3) == poisson_arrivals(5, rate=2, seed=3)
    assert poisson_arrivals(5, rate=2, seed=3) != poisson_arrivals(5, rate=2, seed=4)
    assert poisson_arrivals(5, rate=2, seed=3) == poisson_arrivals(9, rate=2, seed=3)[:5]
