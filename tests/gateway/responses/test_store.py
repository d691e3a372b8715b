"""Stored responses: conversations by id, items by reference, bounds, tenants, and a server without a store."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.serving import DEADLINE_S, GatedEngine, ScriptedEngine
from tripool.gateway.responses.recent import RecentItems
from tripool.gateway.responses.store import PreviousUnknown, ResponseStore, Stored
from tripool.gateway.responses.truncate import fitting, turns

STORE = 2**20


def stored(size: int = 100, *items: str, previous: str | None = None) -> Stored:
    output = [{"type": "message", "role": "assistant", "id": item, "content": item} for item in items]
    asked = msgspec.json.encode([{"role": "user", "content": "x" * size}])
    return Stored(msgspec.json.encode({"output": output}), asked, items, previous)


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_conversation_by_the_id_of_its_last_response(serve):
    with serve(engine=ScriptedEngine("Yes."), response_store_bytes=STORE) as served:
        create = served.openai.responses.create
        first = create(model="fake", input="One?", instructions="Be brief.")
        second = create(model="fake", input="Two?", previous_response_id=first.id)
        third = create(model="fake", input=[{"role": "user", "content": "Three?"}], previous_response_id=second.id)
        assert first.to_dict()["store"] is True and third.previous_response_id == second.id
        said: Any = {"role": "assistant", "content": "Yes."}
        asked: Any = [{"role": "user", "content": f"{word}?"} for word in ("One", "Two", "Three")]
        create(model="fake", input=[asked[0], said, asked[1], said, asked[2]], store=False)
        by_id, by_items = (request.prompt_ids for request in served.engine.added[2:])
        assert by_id == by_items, "instructions are not those of the response before"
        assert served.openai.responses.retrieve(second.id).to_dict() == second.to_dict()
        items = served.openai.responses.input_items.list(third.id, order="asc").data
        assert [item.content[0].text for item in items] == ["Three?"]
        served.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            served.openai.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as broken:
            create(model="fake", input="Four?", previous_response_id=third.id)
        assert (broken.value.code, broken.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store_bytes", [STORE, None])
def test_the_next_request_may_follow_at_once_and_refer_to_items(serve, stream, store_bytes):
    """Also without a store: an answer's own items are kept for a while."""
    with serve(engine=ScriptedEngine("<think>\nhm\n</think>\nYes."), response_store_bytes=store_bytes) as served:
        create = served.openai.responses.create
        if stream:
            output = list(create(model="fake", input="One?", stream=True))[-1].response.output
        else:
            output = create(model="fake", input="One?").output
        references: Any = [{"type": "item_reference", "id": item.id} for item in output]
        asked: Any = [{"role": "user", "content": "One?"}]
        create(model="fake", input=[*asked, *references, {"role": "user", "content": "Two?"}])
        create(model="fake", input=[*asked, *(item.to_dict() for item in output), {"role": "user", "content": "Two?"}])
        _, referred, whole = (request.prompt_ids for request in served.engine.added)
    assert referred == whole


def test_what_is_not_to_be_stored_is_not(serve):
    with serve(engine=ScriptedEngine("Yes."), response_store_bytes=STORE) as served:
        answer = served.openai.responses.create(model="fake", input="One?", store=False)
        assert served.http.get(f"/v1/responses/{answer.id}").status_code == 404


@pytest.mark.parametrize(("store_bytes", "store"), [(None, False), (0, True), (STORE, False)])
def test_items_that_are_not_kept(serve, store_bytes, store):
    """Those of a request that is not to be stored, and all where the operator wants none."""
    with serve(engine=ScriptedEngine("Yes."), response_store_bytes=store_bytes) as served:
        (item,) = served.openai.responses.create(model="fake", input="One?", store=store).output
        with pytest.raises(openai.BadRequestError, match="there is no item"):
            served.openai.responses.create(model="fake", input=[{"type": "item_reference", "id": item.id}])


def test_a_server_without_a_store_says_so(server):
    answer = server.openai.responses.create(model="fake", input="One?", store=True, max_output_tokens=2)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refused = server.http.request(method, f"/v1/responses/{answer.id}{path}")
        assert refused.status_code == 404 and "--response-store-mb" in refused.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="--response-store-mb"):
        server.openai.responses.create(model="fake", input="Two?", previous_response_id=answer.id)


def test_a_response_is_cancelled_from_another_connection(serve):
    engine = GatedEngine(free_steps=3)
    with serve(engine=engine) as served:
        stream = served.openai.responses.create(
            model="fake", input="One?", stream=True, extra_body={"ignore_eos": True}
        )
        response_id = next(iter(stream)).response.id
        running = served.http.get(f"/v1/responses/{response_id}").json()
        assert (running["id"], running["status"]) == (response_id, "in_progress")
        cancelled = served.openai.responses.cancel(response_id)
        assert (cancelled.id, cancelled.status) == (response_id, "cancelled")
        engine.in_flight.set()
        *_, last = stream
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert engine.wait_idle()
        served.wait_empty()
        assert served.http.get(f"/v1/requests/{response_id}/explain").json()["state"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_cancelled_before_its_first_token(serve, stream):
    engine, found = GatedEngine(), []
    with serve(engine=engine) as served:

        def ask() -> None:
            body = {"input": "One?", "request_id": "mine", "stream": stream}
            found.append(served.http.post("/v1/responses", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        assert engine.wait_busy()
        response_id = served.http.get("/v1/requests/mine/explain").json()["id"]
        assert served.http.post(f"/v1/responses/{response_id}/cancel").json()["status"] == "cancelled"
        engine.in_flight.set()
        asking.join(DEADLINE_S)
    (answer,) = found
    assert answer.status_code == 200
    if stream:
        names = [line for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names == [f"event: response.{name}" for name in ("created", "in_progress", "incomplete")]
    else:
        assert (answer.json()["status"], answer.json()["output"]) == ("cancelled", [])


def test_two_requests_of_one_id_are_two_responses(serve):
    with serve(engine=ScriptedEngine("Yes."), response_store_bytes=STORE) as served:
        headers = {"X-Request-Id": "same"}
        create = served.openai.responses.create
        ids = {create(model="fake", input="One?", extra_headers=headers).id for _ in range(2)}
    assert len(ids) == 2


# ---- the store itself -----------------------------------------------------------------------------------------------


def test_tenants_see_their_own_alone():
    store = ResponseStore(1000)
    assert store.keep("alice", "r", stored(10, "m"))
    assert store.find("bob", "r") is None and not store.delete("bob", "r")
    with pytest.raises(PreviousUnknown):
        store.history("bob").before("r")
    assert len(store.history("alice").before("r")) == 2


def test_the_tenant_with_most_loses_what_it_used_least():
    store = ResponseStore(2 * stored().num_bytes + stored(10).num_bytes)
    store.keep("bob", "b", stored(10))
    for name in ("a1", "a2"):
        store.keep("alice", name, stored())
    store.used("alice", "a1")
    store.keep("alice", "a3", stored())
    assert [name for name in ("a1", "a2", "a3") if store.find("alice", name)] == ["a1", "a3"]
    assert store.find("bob", "b") and not store.keep("bob", "huge", stored(10**4))


def test_a_used_conversation_stays_whole():
    store = ResponseStore(4 * stored().num_bytes)
    store.keep("a", "r1", stored(60))
    store.keep("a", "r2", stored(60, previous="r1"))
    store.keep("a", "other", stored(60))
    store.used("a", "r2")
    for number in range(3):
        store.keep("a", f"new{number}", stored(60))
        if store.find("a", "r2"):
            assert store.find("a", "r1"), "a response outlived the one before it"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 400), st.integers(0, 9))))
def test_any_order_of_events_keeps_the_bounds(events):
    store = ResponseStore(1000)
    for tenant, name, size, other in events:
        if size < 20:
            store.delete(tenant, f"r{name}")
        else:
            store.keep(tenant, f"r{name}", stored(size, f"i{name}", previous=f"r{other}" if other != name else None))
        store.used(tenant, f"r{other}")
        store.check_invariants()


# ---- recent items ---------------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_items_end_after_their_time_and_are_their_tenants():
    clock = Clock()
    recent = RecentItems(clock, max_bytes=10_000, max_age_s=10)
    recent.keep("alice", [("m", b'{"id":"m"}')])
    assert recent.find("alice", "m") == {"id": "m"} and recent.find("bob", "m") is None
    clock.now_s = 10.5
    assert recent.find("alice", "m") is None
    recent.keep("bob", [("n", b"{}"), ("huge", b" " * 10_000)])
    assert recent.find("bob", "n") == {} and recent.find("bob", "huge") is None
    recent.check_invariants()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2000), st.integers(0, 5))))
def test_recent_items_keep_their_bounds(events):
    """The newest item is always found, and a tenant with less than a share loses nothing to others."""
    clock = Clock()
    recent = RecentItems(clock, max_bytes=8192, max_age_s=10)
    for number, (tenant, size, passed_s) in enumerate([("quiet", 1, 0), *events]):
        clock.now_s += passed_s
        recent.keep(tenant, [(f"i{number}", b'"' + b"x" * size + b'"')])
        recent.check_invariants()
        assert recent.find(tenant, f"i{number}") == "x" * size
        assert (recent.find("quiet", "i0") is not None) == (clock.now_s <= 10)


# ---- truncation -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=30), st.integers(0, 40))
def test_the_longest_end_that_fits(roles, room):
    messages = [{"role": "system", "content": "s"}, *({"role": role, "content": "x"} for role in roles)]
    asked = 0

    def fits(some: Any) -> bool:
        nonlocal asked
        asked += 1
        return len(some) <= room

    found = fitting(messages, fits)
    kept, grouped = turns(messages)
    ends = [[*kept, *(m for turn in grouped[i:] for m in turn)] for i in range(len(grouped))]
    expected = next((end for end in ends if len(end) <= room), ends[-1])
    assert list(found) == list(expected)
    assert asked <= 2 + len(grouped).bit_length()
