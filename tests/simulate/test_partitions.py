"""Workers on several hosts live through partitions, slow paths and the death of a host, and no client notices."""

from __future__ import annotations

import gc
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import get_args

import pytest

from tests.simulate.test_faults import check
from tests.simulate.test_planted_worker import NUM_SEEDS, PLANTS
from tripool.simulate import Report, simulate
from tripool.simulate.hosts import Hosts
from tripool.simulate.scenario import HostFaultKind

HOSTS = 3
SEEN = ("held by a cut", "blocks from another host", "transfers that a cut ended", "suspected", "refused: bad_kv")


def test_twenty_runs_on_three_hosts() -> None:
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(20):
        report = simulate(seed, hosts=HOSTS)
        check(report)
        seen += report.seen
        faults += report.faults
    assert all(faults[kind] >= 5 for kind in get_args(HostFaultKind)), faults
    assert all(seen[what] >= 2 for what in SEEN), seen


def test_without_faults_hosts_make_no_difference_to_clients() -> None:
    for seed in range(5):
        report = simulate(seed, faults=False, hosts=HOSTS)
        assert set(report.outcomes) <= {"finished", "cancelled", "overloaded", "rate_limited", "ttft_unreachable"}
        assert report.seen["suspected"] == report.seen["refused: bad_kv"] == report.seen["held by a cut"] == 0


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(3, hosts=HOSTS) == simulate(3, hosts=HOSTS) != simulate(3)


def test_what_a_cut_holds_arrives_in_order_when_every_cut_is_over() -> None:
    hosts, log = Hosts(3), []
    there, back = hosts.between(0, 2)
    hosts.cut([there, back])
    hosts.cut([there])
    for number in range(3):
        hosts.carry(0, 2, log.append, number)
        hosts.carry(2, 0, log.append, 10 + number)
    hosts.carry(0, 1, log.append, "elsewhere")
    assert log == ["elsewhere"]
    hosts.mend([there, back])
    assert log == ["elsewhere", 10, 11, 12]
    hosts.mend([there])
    hosts.carry(0, 2, log.append, 3)
    assert log[4:] == [0, 1, 2, 3]


def test_the_slowest_of_several_delays_counts() -> None:
    hosts = Hosts(2)
    paths = hosts.between(0, 1)
    hosts.slow(paths, 0.2)
    hosts.slow(paths[:1], 0.02)
    assert (hosts.delay_s(0, 1), hosts.delay_s(1, 0), hosts.delay_s(0, 0)) == (0.2, 0.2, 0.0)
    hosts.hasten(paths, 0.2)
    assert (hosts.delay_s(0, 1), hosts.delay_s(1, 0)) == (0.02, 0.0)


@pytest.mark.prove
@pytest.mark.parametrize("name", PLANTS)
def test_planted_bugs_are_found_on_three_hosts_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_by = PLANTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found_by):
        some_runs(range(NUM_SEEDS))


def some_runs(seeds: range) -> list[Report]:
    reports = [simulate(seed, hosts=HOSTS) for seed in seeds]
    gc.collect()
    return reports


@pytest.mark.prove
def test_two_thousand_runs_on_three_hosts() -> None:
    batches = [range(start, start + 20) for start in range(20_000, 22_000, 20)]
    num_cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_cores, mp_context=get_context("fork"), initializer=gc.disable) as pool:
        reports = [report for batch in pool.map(some_runs, batches) for report in batch]
    for report in reports:
        check(report)
    assert len(reports) == 2000
    print(f"\n{len(reports)} runs: {sum((report.faults for report in reports), Counter())}")
    print(sum((report.seen for report in reports), Counter()))
