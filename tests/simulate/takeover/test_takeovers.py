"""Coordinators die, stop, lose each other and wake up; one decides, the other is fenced, and no client notices."""

from __future__ import annotations

import gc
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import get_args

import pytest

from tripool.simulate.takeover import Report, simulate_takeovers
from tripool.simulate.takeover.scenario import FaultKind

OUTCOMES = {"finished", "cancelled", "gateway died", "overloaded", "rate_limited", "ttft_unreachable"}


def check(report: Report) -> None:
    assert report.outcomes.total() >= 50 and set(report.outcomes) <= OUTCOMES, report
    assert report.faults.total() >= 4, report


def some_runs(seeds: range) -> list[Report]:
    reports = [simulate_takeovers(seed) for seed in seeds]
    gc.collect()  # a world is full of circles
    return reports


def test_thirty_runs() -> None:
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for report in some_runs(range(30)):
        check(report)
        seen += report.seen
        faults += report.faults
    assert all(faults[kind] >= 5 for kind in get_args(FaultKind)), faults
    for what, times in {
        "resumed": 100, "records": 500, "repeated": 20, "tokens read again": 10, "silent leaders ended": 10,
        "two living leaders": 8, "a leader woke up": 15, "a leader woke up after its successor led": 5,
        "a leader found another one": 3, "decisions of an old leader": 50,
    }.items():  # fmt: skip
        assert seen[what] >= times, f"{what}: only {seen[what]} times"


def test_without_faults_everything_is_finished_or_cancelled() -> None:
    for seed in range(3):
        report = simulate_takeovers(seed, faults=False)
        assert set(report.outcomes) <= OUTCOMES - {"gateway died"}
        assert not report.faults and not report.seen["suspected"] and not report.seen["silent leaders ended"]


def test_the_same_seed_gives_the_same_run() -> None:
    traces: list[list[str]] = [[], []]
    first, second = (simulate_takeovers(1, trace=trace.append) for trace in traces)
    assert first == second and traces[0] == traces[1] != []
    assert simulate_takeovers(2).trace_hash != first.trace_hash


@pytest.mark.prove
def test_two_thousand_runs() -> None:
    batches = [range(start, start + 20) for start in range(30_000, 32_000, 20)]
    num_cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_cores, mp_context=get_context("fork"), initializer=gc.disable) as pool:
        reports = [report for batch in pool.map(some_runs, batches) for report in batch]
    for report in reports:
        check(report)
    assert len(reports) == 2000
    print(f"\n{len(reports)} runs, {sum(report.num_events for report in reports)} events")
    print(sum((report.faults for report in reports), Counter()))
    print(sum((report.seen for report in reports), Counter()))
