"""Workers that a tenant has reserved: only its requests are placed there, and nobody's queue keeps it from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.core import Request, Slo
from tripool.messages import Left, StartPrefill, WorkerId
from tripool.router import Send

from .acting import D0, P0, P1, Stage, ask, hello


def of(tenant: str, request_id: str, prompt: int = 5) -> Request:
    return replace(ask(request_id, prompt=prompt), slo=Slo(tenant=tenant))


def placed(stage: Stage) -> dict[str, WorkerId]:
    """The prefill worker of each request."""
    return {
        out.message.request.id: out.worker_id
        for out in stage.outputs
        if isinstance(out, Send) and isinstance(out.message, StartPrefill)
    }


def test_only_its_tenant_is_placed_on_a_reserved_worker() -> None:
    stage = Stage(P0, D0, prefill_ahead_tokens=100)
    stage.receive(hello(P1, "prefill", reserved_for="acme"))
    for number in range(4):
        stage.submit(of("other", f"o{number}", prompt=80))
        stage.submit(of("acme", f"a{number}", prompt=40))
    found = placed(stage)
    assert found["o0"] == P0 and P1 not in {found.get(f"o{n}") for n in range(4)}
    assert found["a0"] == P1 and found["a1"] == P1, "the queue of the others is not in its way"
    entry = stage.coordinator.ledger.get("o1")
    assert entry is not None and entry.held_by == "the rest is reserved for other tenants"


def test_without_another_worker_others_wait() -> None:
    stage = Stage(D0)
    stage.receive(hello(P0, "prefill", reserved_for="acme"))
    stage.submit(of("", "o"))
    assert not placed(stage)
    stage.receive(hello(P1, "prefill"))
    assert placed(stage) == {"o": P1}


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 90)), max_size=30), st.booleans())
def test_reservations_hold_whatever_comes(requests: list[tuple[str, int]], leaves: bool) -> None:
    """The invariants, among them that of reservations, are checked after every call."""
    stage = Stage(P0, D0, prefill_ahead_tokens=100)
    stage.receive(hello(P1, "prefill", reserved_for="a"))
    for number, (tenant, prompt) in enumerate(requests):
        stage.submit(of(tenant, str(number), prompt))
        if leaves and number == 5:
            stage.receive(Left(P1))
    for name, worker_id in placed(stage).items():
        assert worker_id == P0 or requests[int(name)][0] == "a"


def test_the_invariant_finds_a_stranger() -> None:
    stage = Stage(P0, D0)
    stage.submit(of("other", "o"))
    stage.coordinator.view.reserved[P0] = "acme"
    with pytest.raises(AssertionError, match="reserved for another tenant"):
        stage.coordinator.check()
