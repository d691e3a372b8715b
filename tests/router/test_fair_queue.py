"""Tenants share by weight on tokens, a tenant that asks for less goes first, and none starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission_model import tenant
from tripool.router.fair_queue import Account, FairQueue, fairness, jain, max_min


def anybody(account: Account) -> bool:
    return True


def push(queue: FairQueue, name: str, number: int, cost: float, *, weight: float = 1.0, priority: int = 0) -> None:
    queue.push(f"{name}-{number}", queue.account(tenant(name, weight=weight)), priority, cost)
    queue.check()


def pop(queue: FairQueue) -> str:
    found = queue.pop(anybody)
    queue.check()
    assert found is not None
    return found


def test_tokens_are_shared_by_weight_not_by_requests() -> None:
    queue = FairQueue()
    for number in range(300):
        push(queue, "small", number, 10)
        push(queue, "large", number, 100)
        push(queue, "heavy", number, 50, weight=2)
    costs, got = {"small": 10, "large": 100, "heavy": 50}, Counter[str]()
    while all(account.num_waiting for account in queue):
        name = pop(queue).partition("-")[0]
        got[name] += costs[name]
    assert got["large"] == pytest.approx(got["small"], abs=200)
    assert got["heavy"] == pytest.approx(2 * got["small"], abs=200)


def test_a_late_tenant_goes_before_a_flood_but_saves_nothing_up() -> None:
    queue = FairQueue()
    for number in range(100):
        push(queue, "flood", number, 100)
    for _ in range(50):
        pop(queue)
    for number in range(10):
        push(queue, "late", number, 100)
    order = [pop(queue).partition("-")[0] for _ in range(20)]
    assert order[0] == "late"
    assert Counter(order) == {"late": 10, "flood": 10}


def test_credit_lets_a_quiet_tenant_send_two_at_once() -> None:
    queue = FairQueue()
    queue.credit_tokens = 250
    for number in range(100):
        push(queue, "flood", number, 100)
    for _ in range(50):
        pop(queue)
    for number in range(6):
        push(queue, "late", number, 100)
    order = [pop(queue).partition("-")[0] for _ in range(9)]
    assert order[:3] == ["late"] * 3, "within its credit it goes first"
    assert order.count("late") == 6, "afterwards they alternate"


def test_who_paid_too_much_is_given_back() -> None:
    queue = FairQueue()
    for number in range(40):
        push(queue, "cached", number, 100)
        push(queue, "cold", number, 100)
    got = Counter[str]()
    for _ in range(44):
        name = pop(queue).partition("-")[0]
        got[name] += 1
        if name == "cached":
            account = queue.get("cached")
            assert account is not None
            queue.correct(account, -90)
            queue.check()
    assert got["cached"] >= 9 * got["cold"]


def test_priorities_order_one_tenant_and_no_other() -> None:
    queue = FairQueue()
    push(queue, "a", 0, 10, priority=5)
    push(queue, "a", 1, 10, priority=-5)
    push(queue, "b", 0, 10, priority=100)
    push(queue, "a", 2, 10, priority=5)
    order = [pop(queue) for _ in range(4)]
    assert [name for name in order if name.startswith("a")] == ["a-1", "a-0", "a-2"]
    assert order.index("b-0") <= 1, "another tenant's priorities are no business of b's"


def test_passed_over_tenants_keep_their_place() -> None:
    queue = FairQueue()
    for number in range(3):
        push(queue, "a", number, 10)
        push(queue, "b", number, 10)
    assert queue.pop(lambda account: account.name == "b") == "b-0"
    assert queue.pop(lambda account: False) is None
    queue.check()
    assert pop(queue) == "a-0"


@given(
    asked=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200), st.integers(-2, 2)), max_size=60),
    removed=st.sets(st.integers(0, 59)),
)
def test_everything_pushed_comes_out_once_and_in_order(asked: list[tuple[int, int, int]], removed: set[int]) -> None:
    queue = FairQueue()
    for number, (name, cost, priority) in enumerate(asked):
        push(queue, str(name), number, cost, weight=1.0 + name, priority=priority)
    ids = [f"{name}-{number}" for number, (name, _, _) in enumerate(asked)]
    for number in removed & set(range(len(asked))):
        queue.remove(ids[number])
        queue.check()
    left = {i for number, i in enumerate(ids) if number not in removed}
    came = [pop(queue) for _ in left]
    assert set(came) == left and queue.pop(anybody) is None
    for name in range(5):
        own = [int(i.partition("-")[2]) for i in came if i.startswith(f"{name}-")]
        assert own == sorted(own, key=lambda number: (asked[number][2], number))


@given(
    costs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=80),
    newcomers=st.lists(st.integers(1, 300), max_size=20),
)
def test_no_tenant_waits_for_more_than_the_others_shares(costs: list[tuple[int, int]], newcomers: list[int]) -> None:
    """Starvation: before a request goes, another tenant gets at most as much as its own tenant had before it, and one
    request more; however much comes in behind."""
    queue = FairQueue()
    for number, (name, cost) in enumerate(costs):
        push(queue, str(name), number, cost)
    target = f"{costs[-1][0]}-{len(costs) - 1}"
    before = sum(cost for name, cost in costs if name == costs[-1][0])
    served: Counter[str] = Counter()
    known = {f"{name}-{number}": cost for number, (name, cost) in enumerate(costs)}
    flood = iter(newcomers)
    while (came := pop(queue)) != target:
        name = came.partition("-")[0]
        served[name] += known[came]
        extra = next(flood, None)
        if extra is not None:
            push(queue, "flood", len(known), extra)
            known[f"flood-{len(known)}"] = extra
    largest = max(known.values())
    for name, tokens in served.items():
        if name != target.partition("-")[0]:
            assert tokens <= before + largest


@given(
    asked=st.lists(st.tuples(st.floats(0, 1000), st.floats(0.1, 10)), min_size=1, max_size=10),
    capacity=st.floats(0, 5000),
)
def test_max_min_gives_no_more_than_asked_and_is_envy_free(asked: list[tuple[float, float]], capacity: float) -> None:
    wants, weights = [a for a, _ in asked], [w for _, w in asked]
    got = max_min(wants, weights, capacity)
    assert sum(got) == pytest.approx(min(capacity, sum(wants)), rel=1e-6, abs=1e-6)
    for i, (want, weight) in enumerate(asked):
        assert got[i] <= want + 1e-6
        if got[i] < want - 1e-6:  # a tenant that got less than it asked for got no less per weight than any other
            assert all(got[i] / weight >= got[j] / weights[j] - 1e-6 for j in range(len(got)))


def test_jain() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([]) == jain([0.0]) == 1


def test_fairness_compares_with_what_each_was_entitled_to() -> None:
    small, flood = Account("small", 1.0), Account("flood", 1.0)
    small.count(0.0, asked=100, served=100)
    flood.count(0.0, asked=10_000, served=900)
    assert fairness([small, flood], 0.0) == pytest.approx(1)
    robbed = Account("robbed", 1.0)
    robbed.count(0.0, asked=500, served=20)
    assert fairness([small, flood, robbed], 0.0) < 0.8
