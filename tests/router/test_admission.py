"""Admission: what it refuses and why, what it admits and in which order, and that it loses no request."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from router.admission_model import (
    Ask,
    Model,
    admitted,
    by_tenant,
    new_admission,
    poisson,
    quantile,
    refusals,
    tenant,
)
from tripool.core import Slo
from tripool.errors import AboveRateLimit, Overloaded, RateLimited, TtftUnreachable
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Arrival, Capacity
from tripool.router.fair_queue import jain, max_min
from tripool.router.rate_limiter import RateLimiter
from tripool.tenants import ANONYMOUS, Tenant


def arrival(request_id: str, tokens: int = 100, owner: Tenant = ANONYMOUS, **slo: Any) -> Arrival:
    return Arrival(id=request_id, prompt_tokens=tokens, tenant=owner, slo=Slo(tenant=owner.name, **slo))


def taught(
    admission: AdmissionController,
    *,
    tokens: int = 100,
    seconds: float = 0.1,
    until_s: float = 100.0,
    times: int = 10,
    owner: Tenant = ANONYMOUS,
) -> AdmissionController:
    """Admission that has seen a backend which takes so long for each prompt; idle at `until_s`."""
    now_s = until_s - times * seconds
    for number in range(times):
        assert admitted(admission.arrive(arrival(f"taught-{number}", tokens, owner), now_s))
        now_s += seconds
        admission.first_token(f"taught-{number}", tokens, now_s)
        admission.finished(f"taught-{number}", 1, now_s)
        admission.check(now_s)
    assert admission.idle
    return admission


# ---- letting through ------------------------------------------------------------------------------------------------


def test_an_idle_backend_gets_everything_at_once() -> None:
    admission = new_admission()
    assert admitted(admission.arrive(arrival("a", 10**6), 0.0)) == ["a"]
    admission.check(0.0)


def test_alike_requests_go_far_ahead_and_in_order() -> None:
    admission = new_admission(wide_tokens=1000)
    let = [i for number in range(20) for i in admitted(admission.arrive(arrival(str(number)), 0.0))]
    assert let == [str(number) for number in range(10)], "the window is wide while requests do not compete"
    assert admitted(admission.first_token("0", 100, 1.0)) == ["10"]


def test_while_tenants_compete_the_order_is_decided_here() -> None:
    admission = taught(new_admission())
    one, two = tenant("one"), tenant("two")
    now_s = 100.0
    for number in range(5):
        admission.arrive(arrival(f"one-{number}", 100, one), now_s)
    # One is admitted, as much as keeps the backend busy; a new tenant goes next, before the other four.
    inside, order = ["one-0"], []
    inside += admitted(admission.arrive(arrival("two-0", 100, two), now_s))
    inside += admitted(admission.arrive(arrival("two-1", 100, two), now_s))
    while inside:
        order.append(inside.pop(0))
        now_s += 0.1
        inside += admitted(admission.first_token(order[-1], 100, now_s))
        admission.check(now_s)
    assert order.index("two-0") <= 2
    assert sorted(order) == sorted(["two-0", "two-1", *(f"one-{n}" for n in range(5))])


def test_lower_priorities_go_first() -> None:
    admission = taught(new_admission())
    for number, priority in enumerate([0, 5, 1, -3]):
        admission.arrive(arrival(f"{priority}", priority=priority), 100.0 + number / 1000)
    order, now_s = ["0"], 101.0
    while let := admitted(admission.first_token(order[-1], 100, now_s)):
        order += let
        now_s += 1.0
    assert order == ["0", "-3", "1", "5"]


def test_several_lanes_are_kept_busy() -> None:
    admission = new_admission(lanes=3)
    for name in ("a", "b"):
        admission.arrive(arrival(f"{name}0", 1000, tenant(name)), 0.0)
    assert admitted(admission.arrive(arrival("a1", 1000, tenant("a")), 0.0)) == ["a1"]
    assert admitted(admission.tick(0.1, Capacity(lanes=5))) == []
    assert admitted(admission.arrive(arrival("a2", 1000, tenant("a")), 0.1)) == ["a2"]


def test_slots_are_kept_for_tenants_below_their_share() -> None:
    admission = taught(new_admission(slots=8, reserve=0.25), seconds=0.001)
    flood, late = tenant("flood"), tenant("late")
    admission.arrive(arrival("late-0", 10, late), 100.0)
    admission.finished("late-0", 1, 100.0)
    now_s, let = 100.0, []
    for number in range(20):
        let += admitted(admission.arrive(arrival(f"flood-{number}", 10, flood), now_s))
        now_s += 0.01
        for request_id in let:
            let += admitted(admission.first_token(request_id, 10, now_s))
    assert len(let) == 6, "of eight slots, two are kept"
    assert "decode slots" in str(admission.explain("flood-10", now_s)["waited for admission"])
    assert admitted(admission.arrive(arrival("late-1", 10, late), now_s)) == ["late-1"]
    assert admitted(admission.finished(let[0], 1, now_s)) == [], "two are kept again"
    assert admitted(admission.finished(let[1], 1, now_s)) == ["flood-6"]
    admission.check(now_s)


# ---- refusing -------------------------------------------------------------------------------------------------------


def test_a_promise_that_cannot_be_kept_is_refused_at_once_with_the_time_it_takes() -> None:
    admission = taught(new_admission())
    for number in range(10):
        assert not refusals(admission.arrive(arrival(f"r{number}"), 100.0))
    (refusal,) = refusals(admission.arrive(arrival("strict", ttft_ms=500), 100.0))
    error = refusal.error
    assert isinstance(error, TtftUnreachable) and error.status == 429
    assert error.retry_after_s == pytest.approx(0.6, abs=0.3)
    assert "strict" not in admission
    assert not refusals(admission.arrive(arrival("patient", ttft_ms=5000), 100.0))
    admission.check(100.0)


def test_an_idle_backend_is_tried_even_if_it_was_slow() -> None:
    admission = taught(new_admission(), seconds=2.0)
    assert admitted(admission.arrive(arrival("strict", ttft_ms=100), 200.0)) == ["strict"]
    assert refusals(admission.arrive(arrival("stricter", ttft_ms=100), 200.0))


def test_who_has_waited_too_long_is_refused_without_being_begun() -> None:
    admission = new_admission(wide_tokens=100, max_wait_s=5.0)
    for request_id in ("inside", "waits"):
        admission.arrive(arrival(request_id), 0.0)
    admission.arrive(arrival("strict", ttft_ms=1000), 0.0)
    assert admission.tick(0.9) == []
    (early,) = refusals(admission.tick(1.0))
    assert early.id == "strict" and isinstance(early.error, TtftUnreachable)
    (late,) = refusals(admission.tick(5.0))
    assert late.id == "waits" and type(late.error) is Overloaded
    assert admission.first_token("inside", 100, 6.0) == [], "those who were refused are not let through"
    admission.check(6.0)


def test_the_queue_is_bounded_in_tokens() -> None:
    admission = new_admission(queue_tokens=1000, wide_tokens=100)
    refused = [i for i in range(20) if refusals(admission.arrive(arrival(str(i)), 0.0))]
    assert refused == list(range(10, 20))
    assert refusals(admission.arrive(arrival("long", 10_000), 0.0))
    for i in range(10):
        admission.first_token(str(i), 100, 1.0)
    assert admitted(admission.arrive(arrival("long again", 10_000), 1.0)), "alone, anything fits"


def test_without_an_objective_only_what_probably_waits_too_long_is_refused() -> None:
    admission = taught(new_admission(wide_tokens=100))
    for _ in range(100):
        admission.predictor.trust.learn(1.0, 4.0)  # what was predicted took four times as long
    for number in range(200):  # 20 s of work
        assert not refusals(admission.arrive(arrival(f"before-{number}"), 100.0)), number
    (strict,) = refusals(admission.arrive(arrival("strict", ttft_ms=60_000), 100.0))
    assert isinstance(strict.error, TtftUnreachable)
    assert refusals(admission.arrive(arrival("any"), 100.0)) == []
    most = next(number for number in range(10_000) if refusals(admission.arrive(arrival(f"more-{number}"), 100.0)))
    assert 390 <= most <= 410, "60 s of work"


def test_a_flood_does_not_fill_the_queue_for_others() -> None:
    admission = new_admission(queue_tokens=10_000, wide_tokens=100)
    flood = tenant("flood")
    came = [i for i in range(1000) if not refusals(admission.arrive(arrival(f"f{i}", 100, flood), 0.0))]
    assert 70 <= len(came) <= 82
    assert not refusals(admission.arrive(arrival("other", 100, tenant("other")), 0.0))
    assert not refusals(admission.arrive(arrival("long", 1000, tenant("third")), 0.0))


def test_rates_are_refused_with_the_time_until_it_fits() -> None:
    admission, owner = new_admission(), tenant("a", requests_per_minute=2, tokens_per_minute=1000)
    for number in range(2):
        assert admission.enter(owner, 0.0) is None
        admission.arrive(arrival(str(number), 100, owner), 0.0)
    error = admission.enter(owner, 0.0)
    assert isinstance(error, RateLimited) and error.retry_after_s == pytest.approx(30)
    assert error.code == "rate_limited" and "2 requests per minute" in error.message
    assert admission.enter(tenant("b"), 0.0) is None
    admission.answered("0", 500, 30.0)
    admission.finished("0", 300, 30.0)
    (refusal,) = refusals(admission.arrive(arrival("fourth", 600, owner), 30.0))
    assert "tokens" in refusal.error.message


def test_a_tenant_in_debt_is_refused_before_anything_is_read() -> None:
    admission, owner = new_admission(), tenant("a", tokens_per_minute=100)
    admission.arrive(arrival("long answer", 50, owner), 0.0)
    admission.finished("long answer", 110, 0.0)
    error = admission.enter(owner, 0.0)
    assert isinstance(error, RateLimited) and error.retry_after_s == pytest.approx(36)


def test_a_refused_or_cancelled_wait_costs_no_tokens_but_its_request() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", requests_per_minute=3, tokens_per_minute=300)
    admission = new_admission(rate_limiter=rate_limiter, wide_tokens=50, max_wait_s=1.0)
    for request_id in ("inside", "cancelled", "late"):
        assert admission.enter(owner, 0.0) is None
        admission.arrive(arrival(request_id, 100, owner), 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 0
    admission.cancelled("cancelled", 0.0)
    assert [r.id for r in refusals(admission.tick(1.0))] == ["late"]
    assert rate_limiter.level("a", "tokens", 1.0) == pytest.approx(205)
    assert rate_limiter.level("a", "requests", 1.0) == pytest.approx(0.05), "they were read and tried for it"


@pytest.mark.parametrize(("prompts", "answer_tokens"), [(256, 0), (1, 256_000), (4, 200)])
def test_a_request_that_asks_for_more_than_a_minute_holds_is_refused_for_good(prompts: int, answer_tokens: int) -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=1000)
    admission = new_admission(rate_limiter=rate_limiter)
    first, *rest = (
        Arrival(id=str(n), prompt_tokens=100, answer_tokens=answer_tokens, tenant=owner) for n in range(prompts)
    )
    (refusal,) = refusals(admission.arrive(first, 0.0, rest))
    assert type(refusal.error) is AboveRateLimit and refusal.error.status == 400 and refusal.error.hint
    assert rate_limiter.level("a", "tokens", 0.0) == 1000 and admission.idle
    admission.check(0.0)


def test_what_an_answer_may_take_is_reserved_and_the_rest_given_back() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=6000)
    admission = new_admission(rate_limiter=rate_limiter)
    admission.arrive(Arrival(id="r", prompt_tokens=1000, answer_tokens=3000, tenant=owner), 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 2000
    admission.first_token("r", 100, 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 2900, "cached tokens are not counted"
    admission.answered("r", 500, 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 2900
    admission.finished("r", 20, 0.0)
    assert rate_limiter.level("a", "tokens", 0.0) == 6000 - 100 - 520


def test_cached_prompts_earlier_buy_no_room_now() -> None:
    """Else a tenant would first send what is cached, and then far more than it may."""
    admission, owner = new_admission(), tenant("a", tokens_per_minute=1000)
    for number in range(50):
        admission.arrive(arrival(f"cached-{number}", 900, owner), 0.0)
        admission.first_token(f"cached-{number}", 1, 0.0)
        admission.finished(f"cached-{number}", 1, 0.0)
    (refusal,) = refusals(admission.arrive(arrival("new", 2000, owner), 0.0))
    assert type(refusal.error) is AboveRateLimit


# ---- several prompts in one request ---------------------------------------------------------------------------------


def several(request_id: str, count: int, tokens: int, owner: Tenant = ANONYMOUS) -> list[Arrival]:
    return [arrival(f"{request_id}-{n}", tokens, owner) for n in range(count)]


def test_others_are_admitted_between_the_prompts_of_one_request() -> None:
    admission = taught(new_admission(slots=64))
    first, *rest = several("many", 64, 1000, tenant("many"))
    now_s = 100.0
    order = admitted(admission.arrive(first, now_s, rest))
    # At once, beside a prompt that may take long: the backend computes that in pieces.
    assert admitted(admission.arrive(arrival("other", 100, tenant("other")), now_s)) == ["other"]
    assert admitted(admission.arrive(arrival("more", 100, tenant("other")), now_s)) == [], "but only one"
    assert admitted(admission.first_token("other", 100, now_s + 0.1)) == ["more"]
    admission.check(now_s)
    assert admitted(admission.first_token(order[0], 1000, now_s + 1.0)) == []
    assert admitted(admission.first_token("more", 100, now_s + 1.1)) == ["many-1"], "and all get on"


@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(1000, 0), (5, 100)])
def test_a_backend_made_slow_by_one_tenant_does_not_delay_others(prompt_tokens: int, answer_tokens: int) -> None:
    """Whoever makes it slow must not thereby make others look as if they asked for more than their share."""
    admission, now_s = taught(new_admission(slots=64)), 100.0
    admission.arrive(replace(arrival("long", 5, tenant("many")), answer_tokens=60 * answer_tokens), now_s)
    admission.first_token("long", 5, now_s)
    first, *rest = several("many", 64, prompt_tokens, tenant("many"))
    inside = admitted(admission.arrive(first, now_s, rest))
    for number in range(60):
        now_s += 0.1
        admission.answered("long", answer_tokens, now_s)
        asked = arrival(f"other-{number}", 72, tenant("other"))
        assert admitted(admission.arrive(asked, now_s)) == [asked.id], number
        inside += admitted(admission.first_token(asked.id, 72, now_s)) + admitted(
            admission.finished(asked.id, 4, now_s)
        )
        if number % 5 == 4:  # a prompt in half a second
            inside += admitted(admission.first_token(inside[0], prompt_tokens, now_s))
            inside += admitted(admission.finished(inside.pop(0), 1, now_s))
        admission.check(now_s)


def test_hundreds_of_one_tenants_requests_cause_no_refusal_of_others() -> None:
    """They went in before anybody else was there, and are begun one by one; who comes now is next."""
    many = tenant("many")
    admission = taught(new_admission(slots=64), tokens=1, seconds=0.2, owner=many)
    asked = [replace(arrival(f"many-{number}", 1, many), answer_tokens=2000) for number in range(345)]
    assert len([one for one in asked if admitted(admission.arrive(one, 100.0))]) > 250
    assert admitted(admission.arrive(arrival("other", 1, tenant("other")), 100.0)) == ["other"]
    assert admitted(admission.arrive(arrival("third", 1, tenant("third"), ttft_ms=1000), 100.0)) == ["third"]
    assert refusals(admission.arrive(arrival("again", 1, many, ttft_ms=1000), 100.0)), "but its own are before it"
    admission.check(100.0)


def test_alone_all_prompts_of_a_request_go_in_as_fast_as_ever() -> None:
    admission = new_admission(wide_tokens=1000)
    first, *rest = several("many", 20, 100)
    assert admitted(admission.arrive(first, 0.0, rest)) == [f"many-{n}" for n in range(10)]
    admission.check(0.0)
    assert admitted(admission.first_token("many-0", 100, 1.0)) == ["many-10"]


def test_prompts_that_have_not_arrived_can_be_cancelled_and_hold_nothing() -> None:
    rate_limiter, owner = RateLimiter(), tenant("a", tokens_per_minute=1000)
    admission = new_admission(wide_tokens=100, rate_limiter=rate_limiter)
    first, *rest = several("many", 5, 100, owner)
    assert admitted(admission.arrive(first, 0.0, rest)) == ["many-0"]
    assert rate_limiter.level("a", "tokens", 0.0) == 500
    for gone in ("many-3", "many-1"):
        admission.cancelled(gone, 0.0)
        admission.check(0.0)
    assert "behind earlier prompts" in str(admission.explain("many-4", 0.0))
    assert admitted(admission.first_token("many-0", 100, 1.0)) == ["many-2"]
    for gone in ("many-0", "many-2", "many-4"):
        admission.cancelled(gone, 1.0)
        admission.check(1.0)
    assert admission.idle


def test_one_request_cannot_shut_others_out_of_the_slots() -> None:
    """128 choices in 64 slots: the backend shares them, and admission does not wait for an end."""
    admission = taught(new_admission(slots=64))
    admission.arrive(Arrival(id="many", prompt_tokens=10, choices=128, tenant=tenant("many")), 100.0)
    admission.first_token("many", 10, 100.1)
    for number in range(20):
        assert admitted(admission.arrive(arrival(f"o{number}", 10, tenant("other")), 101.0 + number)) == [f"o{number}"]
        admission.first_token(f"o{number}", 10, 101.1 + number)
        admission.check(101.1 + number)


def test_cancelled_requests_hold_nothing_in_any_stage() -> None:
    admission = new_admission(wide_tokens=150, slots=8)
    for request_id in ("answering", "inside", "waiting"):
        admission.arrive(arrival(request_id, 100, tenant(request_id)), 0.0)
    admission.first_token("answering", 100, 1.0)
    for request_id in ("waiting", "inside", "answering", "unknown"):
        admission.cancelled(request_id, 2.0)
        admission.check(2.0)
    assert admission.idle
    assert admitted(admission.arrive(arrival("again"), 3.0)) == ["again"]


def test_explain_says_what_it_waited_for() -> None:
    admission = taught(new_admission(wide_tokens=100))
    admission.arrive(arrival("inside"), 100.0)
    admission.arrive(arrival("waits", ttft_ms=60_000, priority=3), 100.0)
    facts = admission.explain("waits", 100.25)
    assert str(facts["waited for admission"]).startswith("250.0 ms, because 100 admitted tokens")
    assert facts["predicted first token ms"] == pytest.approx(200, abs=1)
    assert facts["ttft SLO ms"] == 60_000 and facts["priority"] == 3
    assert admission.explain("inside", 100.0)["waited for admission"] == "0.0 ms"
    assert admission.explain("unknown", 100.0) == {}


# ---- whole runs -----------------------------------------------------------------------------------------------------


PROMPT_S = 0.102
"""The model's 100 tokens at 1000 a second, and 2 ms."""


def others(share: float, until_s: float) -> tuple[list[Ask], float]:
    """Four tenants that together ask for this share of the capacity; and the rate of each."""
    rate = share / PROMPT_S / 4
    return [ask for n in range(4) for ask in poisson(tenant(f"other-{n}"), rate, until_s, 100 + n)], rate


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_a_tenant_flooding_tenfold_is_hardly_noticed(share: float) -> None:
    until_s = 400.0
    quiet, rate = others(share, until_s)
    alone = Model(new_admission(), check_every=100).run(quiet)
    flood = poisson(tenant("flood"), 10 * rate, until_s, 7)
    flooded = Model(new_admission(), check_every=100).run([*quiet, *flood])
    before = quantile([outcome.ttft_s for outcome in alone.values()], 0.95)
    mine = [outcome for outcome in flooded.values() if outcome.ask.arrival.tenant.name != "flood"]
    assert all(outcome.refused_s is None for outcome in mine), "no other tenant is refused"
    after = quantile([outcome.ttft_s for outcome in mine], 0.95)
    assert after <= 1.5 * before
    groups = list(by_tenant(flooded).values())
    asked = [100.0 * len(group) for group in groups]
    served = [100.0 * sum(o.first_s is not None and o.first_s <= until_s for o in group) for group in groups]
    entitled = max_min(asked, [1.0] * len(groups), sum(served))
    assert jain([got / due for got, due in zip(served, entitled, strict=True)]) >= 0.95


def test_without_credit_a_flood_is_noticed() -> None:
    """Why there is one: without it, two requests at once are taken for a flood of one's own."""
    quiet, rate = others(0.4, 400.0)
    flood = poisson(tenant("flood"), 10 * rate, 400.0, 7)
    p95 = []
    for asks in (quiet, [*quiet, *flood]):
        outcomes = Model(new_admission(credit_s=0.0), check_every=100).run(asks).values()
        p95.append(quantile([o.ttft_s for o in outcomes if o.ask.arrival.tenant.name != "flood"], 0.95))
    assert p95[1] > 1.4 * p95[0]


def test_two_floods_share_by_weight_and_the_index_says_so() -> None:
    heavy, light = tenant("heavy", weight=3.0), tenant("light", weight=1.0)
    model = Model(new_admission(queue_tokens=10**9, max_wait_s=10**9), check_every=100)
    asks = [*poisson(heavy, 30.0, 100.0, 1), *poisson(light, 30.0, 100.0, 2)]
    found = by_tenant(model.run(asks, until_s=100.0))
    served = {name: sum(o.first_s is not None for o in group) for name, group in found.items()}
    assert served["heavy"] == pytest.approx(3 * served["light"], rel=0.05)


def test_at_twice_the_capacity_refusals_come_at_once_and_the_rest_is_kept() -> None:
    """Open arrivals at 200 %: who is let in gets its first token in time; who is not hears so on arrival."""
    model = Model(new_admission(slots=16), slots=16, check_every=100)
    asks = poisson(tenant("a"), 2.0 / PROMPT_S, 400.0, 3, ttft_ms=1500, answer_s=1.0)
    outcomes = list(model.run(asks).values())
    warm = [o for o in outcomes if o.ask.time_s > 20.0]
    refused = [o for o in warm if o.refused_s is not None]
    kept = [o.ttft_s <= 1.5 for o in warm if o.first_s is not None]
    assert 0.4 < len(refused) / len(warm) < 0.65, "about half is too much"
    at_once = [o.refused_s == o.ask.time_s for o in refused]
    assert sum(at_once) >= 0.99 * len(at_once)
    assert sum(kept) >= 0.99 * len(kept)
    assert all(o.error.retry_after_s > 0 for o in refused)


def test_predictions_are_close_when_the_backend_is_steady() -> None:
    admission = new_admission()
    asks = [a for n in range(3) for a in poisson(tenant(str(n)), 0.8 / PROMPT_S / 3, 400.0, n)]
    Model(admission, check_every=100).run(asks)
    steady = admission.predictions[50:]
    errors = [abs(actual - predicted) for predicted, actual in steady]
    assert quantile(errors, 0.5) <= 0.06 and quantile(errors, 0.9) <= 0.35


def test_cached_prompts_are_charged_by_what_is_computed() -> None:
    """One tenant's prompts are nine tenths cached: with equal shares it gets many more of them."""
    model = Model(new_admission(queue_tokens=10**9, max_wait_s=10**9), check_every=100)
    asks = []
    for name, uncached in (("cached", 10), ("cold", 100)):
        found = poisson(tenant(name), 60.0, 30.0, len(name))
        asks += [Ask(ask.time_s, ask.arrival, uncached) for ask in found]
    found = by_tenant(model.run(asks, until_s=30.0))
    served = {name: sum(o.first_s is not None for o in group) for name, group in found.items()}
    assert served["cached"] >= 5 * served["cold"]


@pytest.mark.parametrize("seed", range(20))
def test_a_random_run_loses_no_request(seed: int) -> None:
    rng = Random(seed)
    owners = [
        tenant(str(n), weight=rng.choice([0.5, 1.0, 3.0]), tokens_per_minute=rng.choice([None, 5000])) for n in range(4)
    ]
    asks = []
    for number in range(300):
        owner = rng.choice(owners)
        slo = Slo(ttft_ms=rng.choice([None, None, 300, 3000]), priority=rng.choice([0, 0, -1, 2]))
        tokens = rng.choice([1, 20, 100, 900])
        came = Arrival(id=str(number), prompt_tokens=tokens, tenant=owner, choices=rng.choice([1, 1, 3]), slo=slo)
        asks.append(Ask(rng.uniform(0, 20), came, rng.randint(1, tokens), rng.choice([0.0, 0.5, 3.0])))
    lanes, slots = rng.choice([1, 2, 4]), rng.choice([None, 2, 8])
    admission = new_admission(lanes=lanes, slots=slots, queue_tokens=rng.choice([500, 5000, 10**6]), max_wait_s=10.0)
    outcomes = Model(admission, slots=slots or 10**9).run(asks).values()
    for outcome in outcomes:
        assert (outcome.first_s is None) != (outcome.refused_s is None), "answered or refused, and not both"
        if outcome.refused_s is not None:
            assert outcome.refused_s - outcome.ask.time_s <= 10.0 + 0.051, "every wait has a bound"
    assert admission.idle
