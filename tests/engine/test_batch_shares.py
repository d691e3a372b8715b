"""No request and no tenant shuts others out of the batch, whoever was there first; and every text stays what it was."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.engine.batch_shares import Claim, Shares
from tripool.sequence import Seq

from .scheduler_sim import Simulation
from .scheduler_traffic import explore


def request(request_id: str, tenant: str = "", *, n: int = 1, max_tokens: int = 40, **more: Any) -> Request:
    slo = Slo(tenant=tenant, job=request_id.partition("-")[0], **more)
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
    return Request(
        id=request_id, prompt_ids=(1, 2, 3), params=params, seed=0, namespace=f"{tenant}{request_id}", slo=slo
    )


def simulation(*, num_blocks: int = 400, max_running: int = 8) -> Simulation:
    config = SchedulerConfig(
        num_blocks=num_blocks, block_tokens=4, max_running=max_running, step_tokens=max_running + 16
    )
    return Simulation(config, 64)


def steps(sim: Simulation, count: int) -> None:
    for _ in range(count):
        sim.begin()
        sim.end()


def places(sim: Simulation) -> Counter[str]:
    return Counter(seq.request.slo.job for seq in sim.scheduler.holders())


def has_token(sim: Simulation, request_id: str) -> bool:
    return any(shadow.num_events for shadow in sim.shadows.values() if shadow.request.id == request_id)


@pytest.mark.parametrize("tenants", [("", ""), ("a", "b")], ids=["open server", "tenants"])
@pytest.mark.parametrize(("num_blocks", "max_running"), [(400, 8), (24, 8)], ids=["slots", "memory"])
def test_many_choices_leave_room_for_one(tenants: tuple[str, str], num_blocks: int, max_running: int) -> None:
    sim = simulation(num_blocks=num_blocks, max_running=max_running)
    sim.add(request("many", tenants[0], n=32))
    steps(sim, 20)
    sim.add(request("one", tenants[1], max_tokens=4))
    steps(sim, 4)
    assert has_token(sim, "one")
    steps(sim, 3)
    assert all(shadow.over for shadow in sim.shadows.values() if shadow.request.id == "one"), "and is not sent back"
    sim.drain()


def test_many_prompts_leave_room_for_one() -> None:
    sim = simulation()
    for number in range(32):
        sim.add(request(f"many-{number}"))
    steps(sim, 20)
    sim.add(request("one", max_tokens=4))
    steps(sim, 3)
    assert has_token(sim, "one")
    sim.drain()


def test_one_newcomer_costs_one_preemption() -> None:
    sim = simulation()
    sim.add(request("many", n=32))
    steps(sim, 10)
    sim.add(request("one", max_tokens=20))
    steps(sim, 18)
    assert sim.scheduler.num_preemptions == 1 and places(sim) == {"many": 7, "one": 1}
    sim.drain()


def test_two_floods_share_by_weight_and_inside_a_tenant_by_request() -> None:
    sim = simulation(max_running=12)
    sim.add(request("first", "a", n=32))
    steps(sim, 5)
    sim.add(request("heavy", "b", n=32, weight=2.0))
    steps(sim, 20)
    assert places(sim) == {"first": 4, "heavy": 8}
    sim.add(request("second", "a", n=32))
    steps(sim, 10)
    assert places(sim) == {"first": 2, "second": 2, "heavy": 8}
    before = sim.scheduler.num_preemptions
    steps(sim, 5)
    assert sim.scheduler.num_preemptions == before, "then it stays so"
    sim.drain()


def test_alone_a_tenant_uses_everything() -> None:
    sim = simulation()
    sim.add(request("many", "a", n=32))
    steps(sim, 4)
    assert places(sim) == {"many": 8}
    sim.add(request("one", "b", max_tokens=2))
    steps(sim, 6)
    assert places(sim) == {"many": 8}, "and again when the other is gone"
    sim.drain()


def test_single_requests_are_never_sent_back_for_others() -> None:
    sim = simulation()
    for number in range(8):
        sim.add(request(f"r{number}"))
    steps(sim, 5)
    sim.add(request("late"))
    steps(sim, 20)
    assert sim.scheduler.num_preemptions == 0 and not has_token(sim, "late")
    sim.drain()


def test_random_lives_of_different_clients_lose_nothing() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += explore(seed, shared=True).seen
    for event in ("exchanged", "preempted with an answer", "hit", "cancelled while it ran", "accepted", "paused"):
        assert seen[event] >= 30, f"{event}: only {seen[event]} times"


@pytest.mark.prove
@pytest.mark.parametrize("batch", range(5))
def test_thousands_of_random_lives_of_different_clients_lose_nothing(batch: int) -> None:
    for seed in range(1000 * batch, 1000 * batch + 1000):
        explore(2_000_000 + seed, num_events=150, shared=True)


@pytest.mark.parametrize("names", ["abcdefgh", "hgfedcba", "dbhfaceg"])
def test_of_tenants_with_equal_use_that_with_the_oldest_sequence_gives_way(names: str) -> None:
    """Not whichever a set of strings yields first: that differs from one process to the next."""
    holders = [
        Seq(request(f"{name}-{turn}", name), 0, 8 * turn + order, 40, [1, 2, 3], table=[order])
        for turn in range(3)
        for order, name in enumerate(names)
    ]
    found = next(Shares(holders, (32, 400)).victims(Claim(Slo(tenant="new"), 1), holders))
    assert (found.request.slo.tenant, found.order) == (names[0], 16)
