"""A full decode worker still gets requests of groups with fewer slots: many choices of one request block no other."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from tripool.core import Request, Slo
from tripool.messages import StartDecode, StartPrefill
from tripool.router.decode_slots import DecodeSlots

from .acting import D0, P0, Stage, ask, hello, sent

LEASES = count(100)


def owned(request: Request, tenant: str, job: str) -> Request:
    return replace(request, slo=Slo(tenant=tenant, job=job))


def full_stage(tenant: str) -> Stage:
    """A decode worker of four places, all of one request of twelve choices."""
    stage = Stage(P0)
    stage.receive(hello(D0, "decode", max_running=4))
    stage.submit(owned(ask("many", n=12, max_tokens=500), tenant, "many"))
    for choice in range(12):
        stage.tokens(P0, 1, 0, 11, choice=choice, request_id="many")
        stage.packed(P0, 1, lease=choice, num_tokens=5, choice=choice, request_id="many")
    assert len(sent(stage.outputs, StartDecode)) == 4
    return stage


def arrive(stage: Stage, request_id: str, tenant: str) -> list[StartDecode]:
    attempt = sent(stage.submit(owned(ask(request_id), tenant, request_id)), StartPrefill)[0].message.attempt
    stage.tokens(P0, attempt, 0, 11, request_id=request_id)
    outputs = stage.packed(P0, attempt, lease=next(LEASES), num_tokens=5, request_id=request_id)
    return [send.message for send in sent(outputs, StartDecode)]


def test_another_tenants_choice_goes_to_a_full_worker() -> None:
    stage = full_stage("a")
    (adopt,) = arrive(stage, "one", "b")
    assert adopt.request.id == "one"


def test_another_request_of_the_same_tenant_does_too() -> None:
    stage = full_stage("")
    (adopt,) = arrive(stage, "one", "")
    assert adopt.request.id == "one"


def test_but_only_up_to_its_share() -> None:
    stage = full_stage("a")
    sent_at_once = [arrive(stage, f"one-{number}", "b") for number in range(6)]
    assert [len(adopts) for adopts in sent_at_once] == [1, 1, 0, 0, 0, 0], "then both have half of four, or nearly"


def test_of_single_requests_none_is_owed_anothers_place() -> None:
    stage = Stage(P0)
    stage.receive(hello(D0, "decode", max_running=4))
    assert [len(arrive(stage, f"r{number}", "")) for number in range(6)] == [1, 1, 1, 1, 0, 0]


def test_owing_counts_tenants_by_weight() -> None:
    places = DecodeSlots()
    for _ in range(4):
        places.place(D0, Slo(tenant="a", weight=2.0, job="x"))
    assert places.owes(D0, Slo(tenant="b", job="y"))
    places.place(D0, Slo(tenant="b", job="y"))
    assert not places.owes(D0, Slo(tenant="b", job="y")), "3 of weight 2 are less than 2 of weight 1"
    for _ in range(4):
        places.take_off(D0, Slo(tenant="a", weight=2.0, job="x"))
    assert not places.owes(D0, Slo(tenant="c", job="z"))


def test_tenants_that_are_gone_are_forgotten_while_others_stay() -> None:
    slots = DecodeSlots()
    slots.place(D0, Slo(tenant="stays", weight=2.0))
    for number in range(5000):
        slots.place(D0, Slo(tenant=f"gone-{number}"))
        slots.take_off(D0, Slo(tenant=f"gone-{number}"))
    assert len(slots._weights) < 1100
    assert not slots.owes(D0, Slo(tenant="new"))
    slots.place(D0, Slo(tenant="stays", weight=2.0))
    slots.place(D0, Slo(tenant="stays", weight=2.0))
    assert slots.owes(D0, Slo(tenant="new")), "its weight is known: two of three slots for twice the weight"
