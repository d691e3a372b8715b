"""Whole deployments live through faults, and no client notices."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tripool.simulate import Report, simulate

MIN_REQUESTS, MIN_FAULTS, MIN_EVENTS = 50, 5, 500
"""Of one run: one in which little happens proves little. Over several hosts the shortest of 2,000 has 900 events."""
REFUSED = ("overloaded", "rate_limited", "ttft_unreachable")


def check(report: Report) -> None:
    assert report.num_requests >= MIN_REQUESTS, f"seed {report.seed}: {report.num_requests} requests"
    assert report.faults.total() >= MIN_FAULTS, f"seed {report.seed}: {report.faults}"
    assert report.num_events >= MIN_EVENTS, f"seed {report.seed}: {report.num_events} events"
    assert report.outcomes.total() == report.num_requests, "a request has no end, or two"
    assert set(report.outcomes) <= {"finished", "cancelled", "gateway died", *REFUSED}


def test_sixty_lives_keep_every_promise() -> None:
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(60):
        report = simulate(seed)
        check(report)
        seen += report.seen
        faults += report.faults
        outcomes += report.outcomes
    assert all(outcomes[code] >= 3 for code in REFUSED), outcomes
    # The checks are worth what the faults make happen.
    for kind in (
        "kill",
        "stop",
        "slow",
        "cut",
        "loss",
        "cache restart",
        "gateway restart",
        "coordinator restart",
        "burst",
        "drain",
    ):
        assert faults[kind] >= 5, f"{kind}: only {faults[kind]} times"
    for event, times in {
        "suspected": 30,
        "woke up untrusted": 5,
        "woke up trusted": 5,
        "woke up in a write": 1,
        "woke up in a read": 5,
        "tokens of an untrusted worker": 5,
        "messages of an earlier session": 5,
        "dropped events of old attempts": 20,
        "preempted": 10,
        "refused: bad_kv": 20,
        "left after a drain": 5,
        "blocks fetched from the cache": 500,
        "blocks evicted": 500,
        "waited for admission": 300,
        "requests taken over": 100,
        "requests taken over with tokens": 30,
        "cancelled before admission": 20,
        "blocks written to disk": 500,
        "blocks read from disk": 100,
        "blocks fetched from disk": 50,
        "blocks found on disk": 50,
        "blocks torn on disk": 1,
        "bad blocks on disk": 1,
    }.items():
        assert seen[event] >= times, f"{event}: only {seen[event]} times"


def test_without_faults_everything_is_finished_or_cancelled() -> None:
    for seed in range(5):
        report = simulate(seed, faults=False)
        assert not report.faults and set(report.outcomes) <= {"finished", "cancelled", *REFUSED}
        assert report.seen["suspected"] == 0


def test_the_same_seed_gives_the_same_life() -> None:
    for seed in range(5):
        traces: list[list[str]] = [[], []]
        first, second = (simulate(seed, trace=trace.append) for trace in traces)
        assert first == second and traces[0] == traces[1] != []
        assert simulate(seed).trace_hash == first.trace_hash, "watching changes what happens"
    assert len({simulate(seed).trace_hash for seed in range(5)}) == 5


def some_lives(seeds: range) -> list[Report]:
    reports = [simulate(seed) for seed in seeds]
    gc.collect()  # a world is full of circles
    return reports


@pytest.mark.prove
def test_two_thousand_runs_in_three_minutes() -> None:
    started_s = time.monotonic()
    batches = [range(start, start + 20) for start in range(10_000, 12_000, 20)]
    num_cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_cores, mp_context=get_context("fork"), initializer=gc.disable) as pool:
        reports = [report for batch in pool.map(some_lives, batches) for report in batch]
    elapsed_s = time.monotonic() - started_s
    for report in reports:
        check(report)
    num_events = sum(report.num_events for report in reports)
    print(f"\n{len(reports)} lives, {num_events} events in {elapsed_s:.1f} s")
    assert len(reports) == 2000 and elapsed_s <= 180
