"""Statistics, against numpy where it has the answer and by hand where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench import Goodput, summarise
from tripool.bench.summary import Distribution, percentile, timeline

from .made_samples import made

seconds = st.floats(0, 1e4, allow_nan=False)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(seconds, min_size=1), st.floats(0, 100))
def test_percentile_is_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(seconds, min_size=1))
def test_distribution(values):
    found = Distribution.of(values)
    assert found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values) * 1e3)
    assert found.p50 <= found.p90 <= found.p95 <= found.p99 <= found.max == max(values) * 1e3


def test_nothing_has_no_distribution():
    assert Distribution.of([]) is None


def test_times_of_one_request():
    sample = made(sent_s=1.0, events_s=[1.5, 1.6, 1.9], completion_tokens=5, end_s=2.0, due_s=0.75)
    assert sample.ttft_s == 0.5
    assert sample.tpot_s == pytest.approx(0.4 / 4)  # five tokens in three events: drafts came true
    assert sample.gaps_s() == pytest.approx([0.1, 0.3])
    assert (sample.e2e_s, sample.late_s, sample.tokens) == (1.0, 0.25, 5)
    assert made(events_s=[1.0]).tpot_s is None
    assert made().ttft_s is None
    assert made(events_s=[0.1, 0.2]).tokens == 2


def test_a_summary_by_hand():
    samples = [
        made(0, sent_s=0.0, events_s=[1.0, 2.0], prompt_tokens=10, cached_tokens=4, completion_tokens=2),
        made(1, sent_s=1.0, events_s=[4.0], prompt_tokens=10, cached_tokens=0, completion_tokens=1),
        made(2, sent_s=1.0, end_s=2.0, error="http 429"),
        made(3, sent_s=1.0, events_s=[1.5], end_s=2.0, error="timeout"),
        made(4, sent_s=1.0, end_s=2.0, error="http 429"),
    ]
    found = summarise(samples, 5.0, goodput=Goodput.parse("ttft:1000"), cancelled=3)
    assert (found.completed, found.failed, found.cancelled) == (2, 3, 3)
    assert found.errors == {"http 429": 2, "timeout": 1}
    assert list(found.errors) == ["http 429", "timeout"]
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens, found.events) == (20, 4, 3, 3)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.4, 0.6, 4.6)
    assert found.mean_concurrency == (2 + 3 + 1 + 1 + 1) / 5
    assert (found.good, found.goodput_per_s) == (1, 0.2)
    assert (found.ttft_ms.count, found.ttft_ms.mean) == (2, 2000)
    assert (found.tpot_ms.count, found.itl_ms.count, found.e2e_ms.max) == (1, 1, 3000)
    assert found.late_ms is None


def test_nothing_measured():
    found = summarise([], 0.0)
    assert (found.completed, found.ttft_ms, found.good, found.cached_tokens) == (0, None, None, None)
    assert found.warnings == ()
    assert timeline([], 0.0).tokens_per_s == (0.0,)


def test_warnings():
    late = [made(i, due_s=0.0, sent_s=0.2, events_s=[0.3]) for i in range(3)]
    assert "sent late" in summarise(late, 1.0).warnings[0]
    assert "lagged" in summarise([made()], 1.0, client_lags_s=[0.2]).warnings[0]
    assert "tokens where" in summarise([made(events_s=[1.0], prompt_tokens=100)], 1.0).warnings[0]
    assert "shorter than asked" in summarise([made(events_s=[1.0], output_tokens=2)], 1.0).warnings[0]
    fine = made(due_s=0.0, sent_s=0.001, events_s=[0.3], prompt_tokens=8)
    assert summarise([fine], 1.0, client_lags_s=[0.001]).warnings == ()


@st.composite
def runs(draw: st.DrawFn):
    samples = []
    for index in range(draw(st.integers(0, 8))):
        sent_s = draw(st.floats(0, 50))
        gaps = draw(st.lists(st.floats(0, 9), max_size=6))
        events = [sent_s + sum(gaps[: k + 1]) for k in range(len(gaps))]
        samples.append(made(index, sent_s=sent_s, events_s=events))
    return samples, max([0.001, *(sample.end_s for sample in samples)])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(runs())
def test_a_timeline_loses_nothing(run):
    samples, duration_s = run
    found = timeline(samples, duration_s, max_slices=30)
    assert 1 <= len(found.tokens_per_s) == len(found.concurrency) <= 30
    last_s = duration_s - found.slice_s * (len(found.tokens_per_s) - 1)
    lengths = [found.slice_s] * (len(found.tokens_per_s) - 1) + [last_s]
    tokens = sum(rate * length for rate, length in zip(found.tokens_per_s, lengths, strict=True))
    open_s = sum(width * length for width, length in zip(found.concurrency, lengths, strict=True))
    assert tokens == pytest.approx(sum(len(sample.events_s) for sample in samples), abs=1e-6)
    assert open_s == pytest.approx(sum(sample.e2e_s for sample in samples), rel=1e-6, abs=1e-6)
