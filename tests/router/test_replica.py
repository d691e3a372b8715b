"""A standby's replica: any split of the log into records adds up to the same, and a takeover keeps limits and order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tripool.config import AdmissionConfig, RouterConfig
from tripool.core import Request, SamplingParams, Slo, TokenEvent
from tripool.messages import PROTOCOL, Hello, Stamped, StartPrefill, Tokens, WorkerId
from tripool.router.held import Held, HeldChoice
from tripool.router.outputs import Emit, Fail, Output, Send
from tripool.router.rate_limiter import RateLimiter
from tripool.router.replica import Given, Lease, Level, Record, Replica, Trouble
from tripool.router.service import ModelService
from tripool.tenants import Limits, Tenant

levels = st.builds(
    Level,
    st.sampled_from("ab"),
    st.sampled_from(["requests", "tokens"]),
    st.just(60.0),
    st.floats(-60, 60),
    st.just(1.0),
)
givens = st.builds(Given, st.just("m"), st.sampled_from("ab"), st.just(1.0), st.floats(0, 1e6), st.floats(0, 1e6))
troubles = st.builds(Trouble, st.sampled_from("pqr"), st.integers(0, 9), st.integers(0, 2))
records = st.builds(Record, st.lists(levels).map(tuple), st.lists(givens).map(tuple), st.lists(troubles).map(tuple))


@given(st.lists(records, max_size=8), st.integers(0, 8))
def test_a_standby_that_joins_late_knows_what_one_knows_that_was_always_there(log: list[Record], joins: int) -> None:
    always, late = Replica(), Replica()
    for number, record in enumerate(log):
        if number == joins:
            late.apply(always.state)
        always.apply(record)
        if number >= joins:
            late.apply(record)
    if joins < len(log):
        assert late.state == always.state


def test_a_takeover_fills_no_bucket() -> None:
    tenant = Tenant(name="t", namespace="t", limits=Limits(requests_per_minute=2, tokens_per_minute=600))
    before, after, replica = RateLimiter(), RateLimiter(), Replica()
    before.take(tenant, 2, 600, now_s=100.0)
    replica.apply(Record(levels=before.changes(100.0)))
    assert before.changes(100.0) == (), "nothing is said twice"
    after.restore(replica.state.levels)
    for limit in ("requests", "tokens"):
        assert after.level("t", limit, 115.0) == before.level("t", limit, 115.0)
    assert after.refusal(tenant, 1, 0, 101.0) is not None
    assert after.refusal(tenant, 1, 100, 131.0) is None


def services(**limits: Limits) -> tuple[ModelService, dict[str, Tenant]]:
    tenants = {name: Tenant(name=name, namespace=name, limits=limit) for name, limit in limits.items()}
    return ModelService(RouterConfig(), epoch=1, admission=AdmissionConfig()), tenants


def request(name: str, tenant: str = "", num_tokens: int = 10, **params: int) -> Request:
    return Request(
        id=name,
        prompt_ids=tuple(range(num_tokens)),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=1,
        slo=Slo(tenant=tenant),
    )


def test_what_a_tenant_was_given_is_known_after_a_takeover() -> None:
    first, tenants = services(greedy=Limits(), modest=Limits())
    first.submit([request("a", "greedy", 5000)], tenants["greedy"], 1.0)
    first.submit([request("b", "modest", 10)], tenants["modest"], 1.0)
    replica = Replica()
    replica.apply(Record(given=first.admission.queue.changes("m")))
    second, _ = services()
    second.restore(replica, "m")
    greedy, modest = second.admission.queue.get("greedy"), second.admission.queue.get("modest")
    assert greedy is not None and modest is not None and greedy.given > modest.given


def test_a_request_that_lost_workers_is_known_for_it_after_a_takeover() -> None:
    second, tenants = services(t=Limits())
    replica = Replica()
    replica.apply(Record(troubles=(Trouble("a", 5, 1), Trouble("gone", 1, 0))))
    second.restore(replica, "m")
    second.resume(request("a", "t", max_tokens=5), tenants["t"], Held((HeldChoice((1, 2)),), 0), 2.0)
    entry = second.coordinator.ledger.get("a")
    assert entry is not None and (entry.num_losses, entry.num_crashes) == (5, 1)
    assert entry.choices[0].tokens == [1, 2]
    assert second.coordinator.troubles(everything=True) == (Trouble("a", 5, 1),)
    second.check(2.0)


def test_what_was_charged_before_a_takeover_is_neither_charged_nor_refused_again() -> None:
    """The bucket is empty, and all of it belongs to the request that is resumed."""
    limits = Limits(requests_per_minute=1, tokens_per_minute=100)
    first, tenants = services(t=limits)
    first.submit([request("a", "t", 40, max_tokens=60)], tenants["t"], 1.0)
    replica = Replica()
    replica.apply(Record(levels=first.admission.rate_limiter.changes(1.0)))
    second, _ = services()
    second.admission.rate_limiter.restore(replica.state.levels)
    held = Held((HeldChoice(tuple(range(50))),), 0)
    outputs = second.resume(request("a", "t", 40, max_tokens=60), tenants["t"], held, 1.0)
    assert not [output for output in outputs if isinstance(output, Fail)]
    assert second.admission.rate_limiter.level("t", "tokens", 1.0) == 0.0
    second.check(1.0)
    second.cancel("a", 1.0)  # of its 60 answer tokens 50 were generated
    assert second.admission.rate_limiter.level("t", "tokens", 1.0) == 10.0


def test_an_answer_without_a_length_is_bounded_after_a_takeover_too() -> None:
    """But has room for one token more than its client has."""
    service, tenants = services(t=Limits(tokens_per_minute=700))
    tenant = tenants["t"]
    service.context_tokens = 4096
    service.resume(request("a", "t"), tenant, Held((HeldChoice((1, 2)),)), 1.0)
    service.resume(request("b", "t"), tenant, Held((HeldChoice(tuple(range(900))),)), 1.0)
    lengths = [service.coordinator.ledger.get(name) for name in ("a", "b")]
    assert [entry and entry.request.params.max_tokens for entry in lengths] == [345, 901]


def test_tokens_of_before_a_broken_connection_are_not_those_of_after_it() -> None:
    """The same coordinator cancels a request with its gateway's session, and gets it back in the next one."""
    service, tenants = services(t=Limits())
    worker = WorkerId("prefill-0", 1)
    service.receive(Hello(PROTOCOL, "prefill", worker, 1, "m", 4096, 8, 4096, 100), 1.0)

    def attempts(outputs: list[Output]) -> list[int]:
        return [o.message.attempt for o in outputs if isinstance(o, Send) and isinstance(o.message, StartPrefill)]

    (before,) = attempts(service.submit([request("a", "t", max_tokens=5)], tenants["t"], 1.0))
    service.cancel("a", 1.1)
    held = Held((HeldChoice(()),))
    (after,) = attempts(service.resume(request("a", "t", max_tokens=5), tenants["t"], held, 1.2))
    assert after > before
    late = Tokens(worker, (Stamped(before, TokenEvent("a", 0, 0, 7)),))
    assert not [output for output in service.receive(late, 1.3) if isinstance(output, Emit)]
    fresh = Tokens(worker, (Stamped(after, TokenEvent("a", 0, 0, 7)),))
    assert [output for output in service.receive(fresh, 1.3) if isinstance(output, Emit)]


def test_resumed_twice_is_resumed_once() -> None:
    service, tenants = services(t=Limits())
    held = Held((HeldChoice(()),))
    service.resume(request("a", "t"), tenants["t"], held, 1.0)
    assert service.resume(request("a", "t"), tenants["t"], held, 1.0) == []
    assert len(service) == 1 and not [o for o in service.tick(1.1) if isinstance(o, Emit)]


def test_a_silent_leader_has_to_go_sooner_when_it_is_stopped() -> None:
    lease, now_s = Lease(0.0), 0.0
    while not lease.is_over(now_s, stopped=True):
        now_s += 0.05
    assert 0.6 < now_s < 0.8
    lease.renew(now_s)
    assert not lease.is_over(now_s + 0.05, stopped=True)
    while not lease.is_over(now_s, stopped=False):
        now_s += 0.05
    assert 3.6 < now_s < 3.9


def test_a_standby_that_was_stopped_itself_judges_nobody() -> None:
    lease = Lease(0.0)
    lease.is_over(0.1, stopped=True)
    assert not lease.is_over(10.0, stopped=True), "it looked at nothing for ten seconds"
    assert not lease.is_over(10.2, stopped=True)
    assert lease.is_over(10.45, stopped=True) or lease.is_over(10.7, stopped=True), "now it did"
