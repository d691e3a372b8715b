"""Admission over real sockets: refusals in both dialects, waiting, order, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvloop

from gateway.serving import DEADLINE_S, GatedEngine, Serve, Served
from tripool.config import AdmissionConfig
from tripool.core import Request, SamplingParams, ServingStats, Slo, TokenEvent
from tripool.errors import EngineStopped, Overloaded
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.backend import Facts
from tripool.grammar import Trial
from tripool.router.admission_types import Capacity
from tripool.tenants import Limits, Tenant
from tripool.token_stream import TokenStream, Watcher

NARROW = AdmissionConfig(window_s=1e-9, wide_tokens=1, max_wait_s=3600.0)
"""One prompt admitted at a time; a long wait: a machine that paused while the predictor learned predicts much."""


def limited(**limits: Any) -> Callable[[str], Tenant]:
    return lambda name: Tenant(name=name, namespace=name, limits=Limits(**limits))


def ask(served: Served, prompt: str = "hello", *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
    return served.http.post("/v1/completions", json=body, headers=headers or {})


def num_waiting(served: Served) -> int:
    text = served.http.get("/metrics").text
    return sum(int(float(n)) for n in re.findall(r"^tripool_admission_waiting\{.*\} (\S+)$", text, re.MULTILINE))


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s


@contextmanager
def blocked(
    serve: Serve, admission: AdmissionConfig, *, num_answered: int = 4, **more: Any
) -> Iterator[tuple[Served, ThreadPoolExecutor]]:
    """A server whose engine has answered a few requests and stands still; at the end it goes on, and all must end."""
    engine = GatedEngine()
    engine.in_flight.set()
    with serve(engine=engine, admission=admission, **more) as served, ThreadPoolExecutor(8) as pool:
        for number in range(num_answered):
            assert ask(served, f"warm {number}").status_code == 200
        assert engine.wait_idle()
        engine.added.clear()
        engine.in_flight.clear()
        try:
            yield served, pool
        finally:
            engine.in_flight.set()
        served.wait_empty()
        assert engine.wait_idle() and num_waiting(served) == 0


def begin(served: Served, pool: ThreadPoolExecutor, prompt: str, **more: Any) -> Future[httpx.Response]:
    """A request that waits for admission."""
    before = num_waiting(served)
    future = pool.submit(ask, served, prompt, **more)
    wait_for(lambda: future.done() or num_waiting(served) == before + 1)
    assert not future.done(), future.result().text
    return future


def enter(served: Served, pool: ThreadPoolExecutor, prompt: str = "first", **more: Any) -> Future[httpx.Response]:
    """A request that is inside the engine."""
    future = pool.submit(ask, served, prompt, **more)
    assert served.engine.wait_busy()
    return future


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_refused_request_gets_429_and_never_reaches_the_engine(serve: Serve) -> None:
    with serve(tenants=limited(requests_per_minute=1)) as served:
        assert ask(served).status_code == 200
        for stream in (False, True):
            refused = ask(served, stream=stream)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
            assert "1 requests per minute" in error["message"] and "try again" in error["message"]
        messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        refused = served.http.post("/v1/messages", json=messages)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert len(served.engine.added) == 1
        text = served.http.get("/metrics").text
        assert re.search(r'^tripool_requests_refused_total\{.*code="rate_limited".*\} 3', text, re.MULTILINE)


def test_explain_names_the_limit_that_refused(serve: Serve) -> None:
    with serve(tenants=limited(tokens_per_minute=20)) as served:
        assert ask(served, "some words").status_code == 200
        refused = ask(served, "some words here", headers={"x-request-id": "refused-one"})
        assert refused.status_code == 429
        shown = served.http.get("/v1/requests/refused-one/explain").json()
        assert (shown["state"], shown["error"]) == ("failed", "rate_limited")
        assert "20 tokens per minute" in shown["placement"][0]["refused by admission control"]


@pytest.mark.parametrize(
    ("per_minute", "more", "num_tokens"),
    [(300, {}, 256), (1000, {"n": 3}, 768), (2000, {}, 999), (2000, {"min_tokens": 1500}, 1500)],
)
def test_an_answer_without_a_length_never_exceeds_its_tenants_rate(
    serve: Serve, per_minute: int, more: dict[str, Any], num_tokens: int
) -> None:
    """It may have half of what is left, 256 at least, what it must have, and no more than the context holds."""
    with serve(tenants=limited(tokens_per_minute=per_minute)) as served:
        answer = ask(served, "a", max_tokens=None, **more).json()
        assert answer["usage"]["completion_tokens"] == num_tokens
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        left = per_minute - num_tokens - 1
        assert ask(served, "a", max_tokens=left + per_minute // 4).status_code == 429, "all of it was charged"
        assert served.engine.wait_idle() and ask(served, "a", max_tokens=max(1, left - 50)).status_code == 200


def test_what_it_must_answer_counts_before_it_begins(serve: Serve) -> None:
    with serve(tenants=limited(tokens_per_minute=1000)) as served:
        refused = ask(served, "a", max_tokens=None, min_tokens=1500)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "above_rate_limit"
        assert served.engine.added == []


def hang_up(served: Served, body: dict[str, Any]) -> None:
    """Read a little of a stream, wait until all of it is computed, and reset the connection."""
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(DEADLINE_S)
        connection.connect(served.address)
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        assert connection.recv(300).startswith(b"HTTP/1.1 200")
        assert served.engine.wait_idle()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    served.wait_empty()


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]], ids=["one", "merged"])
def test_tokens_that_were_computed_are_charged_whether_they_are_read_or_not(serve: Serve, prompt: Any) -> None:
    with serve(tenants=limited(tokens_per_minute=1000)) as served:
        n = 8 if prompt == "a" else 4
        hang_up(served, {"prompt": prompt, "n": n, "max_tokens": 100, "logprobs": 20, "ignore_eos": True})
        refused = ask(served, "a", max_tokens=400)
        assert refused.status_code == 429, "800 of 1,000 were used"


@pytest.mark.parametrize(
    "more", [{"prompt": ["some words here"] * 256}, {"n": 128}, {"max_tokens": 2000}], ids=["prompts", "n", "length"]
)
def test_a_request_above_its_tenants_rate_is_refused_whole(serve: Serve, more: dict[str, Any]) -> None:
    with serve(tenants=limited(tokens_per_minute=1000)) as served:
        body = {"prompt": "a", "max_tokens": 10, **more}
        refused = served.http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "above_rate_limit" and "1000 per minute" in error["message"]
        assert served.engine.added == []
        assert ask(served, "a").status_code == 200


def test_every_request_counts_also_those_that_are_refused_or_generate_nothing(serve: Serve) -> None:
    with serve(tenants=limited(requests_per_minute=4)) as served:
        http = served.http
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert http.post("/detokenize", json={"tokens": [5]}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": 7}).status_code == 400
        assert http.post("/v1/completions", json={"prompt": "a", "guided_regex": "("}).status_code == 400
        assert ask(served).status_code == 429
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            refused = http.post(path, json=body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        count = {"messages": [{"role": "user", "content": "a"}]}
        assert http.post("/v1/messages/count_tokens", json=count).status_code == 429
        assert served.engine.added == []


def test_grammars_of_a_tenant_above_its_rate_are_not_tried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(Trial, "check", lambda self, structure, namespace: tried.append(structure.value))
    with serve(tenants=limited(requests_per_minute=1)) as served:
        statuses = [ask(served, guided_regex=f"a{number}").status_code for number in range(5)]
        assert statuses == [200, 429, 429, 429, 429] and tried == ["a0"]


def test_a_full_queue_refuses(serve: Serve) -> None:
    with blocked(serve, replace(NARROW, queue_tokens=30)) as (served, pool):
        first = enter(served, pool, "x" * 10)
        second = begin(served, pool, "y" * 10)
        refused = ask(served, "z" * 20)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "overloaded"
        assert len(served.engine.added) == 1, "who waits is not in the engine"
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        assert first.result().status_code == second.result().status_code == 200
        assert len(served.engine.added) == 2


@pytest.mark.parametrize(
    "wish", [{"headers": {"X-Tripool-TTFT-Ms": "0.001"}}, {"slo": {"ttft_ms": 0.001}}], ids=["header", "body"]
)
def test_a_first_token_that_would_be_late_is_refused_at_once(serve: Serve, wish: dict[str, Any]) -> None:
    with blocked(serve, NARROW) as (served, pool):
        first = enter(served, pool)
        refused = ask(served, **wish)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "ttft_unreachable"
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        assert first.result().status_code == 200 and len(served.engine.added) == 1


def test_who_waits_too_long_is_refused(serve: Serve) -> None:
    with blocked(serve, replace(NARROW, max_wait_s=0.2), num_answered=0) as (served, pool):  # nothing to predict from
        enter(served, pool)
        refused = ask(served, "late")
        assert refused.status_code == 429 and "waited" in refused.json()["error"]["message"]
        assert len(served.engine.added) == 1


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_a_request_that_waited_is_served_and_reports_how_long(serve: Serve) -> None:
    with blocked(serve, NARROW) as (served, pool):
        first = enter(served, pool)
        second = begin(served, pool, "second", headers={"x-request-id": "waited"})
        assert served.http.get("/load").json()["waiting"] >= 1
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        assert first.result().status_code == 200
        answer = second.result().json()
        assert answer["tripool"]["timing"]["queue"] > 0
        (shown,) = served.http.get("/v1/requests/waited/explain").json()["placement"]
        assert "because" in shown["waited for admission"]
        assert shown["predicted first token ms"] >= 0, "a prediction was made; of a fake engine it may round to nothing"


def test_lower_priorities_overtake(serve: Serve) -> None:
    with blocked(serve, NARROW) as (served, pool):
        waiting = [enter(served, pool, "first")]
        for prompt, priority in (("last", 7), ("middle", 0), ("early", -7)):
            waiting.append(begin(served, pool, prompt, priority=priority))
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        assert all(future.result().status_code == 200 for future in waiting)
        assert [request.slo.priority for request in served.engine.added] == [0, -7, 0, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_waiting_leaves_nothing(serve: Serve, stream: bool) -> None:
    with blocked(serve, NARROW) as (served, pool):
        enter(served, pool)
        body = json.dumps({"prompt": "gone", "max_tokens": 2, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection(served.address, timeout=DEADLINE_S) as connection:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            wait_for(lambda: num_waiting(served) == 1)
        wait_for(lambda: num_waiting(served) == 0)
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        served.wait_empty()
        assert len(served.engine.added) == 1


def test_several_prompts_go_through_together(serve: Serve) -> None:
    with blocked(serve, NARROW) as (served, pool):
        enter(served, pool)
        several = begin(served, pool, ["one", "two", "three"], n=2)  # type: ignore[arg-type]
        served.engine.in_flight.set()  # type: ignore[attr-defined]
        assert len(several.result().json()["choices"]) == 6


def test_an_engine_that_fails_ends_those_who_wait(serve: Serve) -> None:
    engine = GatedEngine()
    with serve(engine=engine, admission=NARROW) as served, ThreadPoolExecutor(8) as pool:
        first, second = enter(served, pool), begin(served, pool, "second")
        served.server.engines.end()
        assert first.result().status_code == second.result().status_code == 503
        engine.in_flight.set()


# ---- promises -------------------------------------------------------------------------------------------------------


def test_promises_reach_the_engine(server: Served) -> None:
    headers = {"X-Tripool-TPOT-Ms": "30", "x-tripool-ttft-ms": "60000"}
    assert ask(server, headers=headers, slo={"ttft_ms": 5000}, priority=3).status_code == 200
    slo = server.engine.added[-1].slo
    assert slo == Slo(tpot_ms=30, ttft_ms=5000, priority=3, job=slo.job)
    server.http.post(
        "/v1/messages",
        json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "slo": {"tpot_ms": 15}, "priority": -1},
    ).raise_for_status()
    slo = server.engine.added[-1].slo
    assert slo == Slo(tpot_ms=15, priority=-1, job=slo.job)


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": "soon"}}, {}, "slo.ttft_ms"),
        ({"slo": {"tpot": 1}}, {}, "slo"),
        ({"slo": 5}, {}, "slo"),
        ({"priority": 1001}, {}, "priority"),
        ({"priority": "high"}, {}, "priority"),
        ({}, {"X-Tripool-TTFT-Ms": "soon"}, "x-tripool-ttft-ms"),
        ({}, {"X-Tripool-TPOT-Ms": "nan"}, "x-tripool-tpot-ms"),
        ({}, {"X-Tripool-TPOT-Ms": "-1"}, "x-tripool-tpot-ms"),
    ],
)
def test_promises_of_the_wrong_shape_are_refused(
    server: Served, check_refusal: Callable[..., None], body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    check_refusal(ask(server, headers=headers, **body), param)


# ---- without sockets ------------------------------------------------------------------------------------------------

"""A backend that answers on demand."""


class Slow:
    """A backend that answers when it is told to."""

    def __init__(self) -> None:
        self.alive, self.context_tokens = True, 1000
        self.let_go = asyncio.Event()
        self.seen: list[str] = []
        self.cancelled: list[str] = []

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        self.seen += [request.id for request in requests]
        await self.let_go.wait()
        for request in requests:
            if not self.alive:
                raise EngineStopped("over")
            event = TokenEvent(request.id, 0, 0, 1, "stop", num_cached_tokens=1)
            if watcher is not None:
                watcher.made(event)
            yield event

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> ServingStats:
        return ServingStats()

    def explain(self, request_id: str) -> Facts:
        return {"mode": "slow"} if request_id in self.seen else {}


def request(request_id: str) -> Request:
    return Request(id=request_id, prompt_ids=(1, 2, 3), params=SamplingParams(), seed=0)


async def collect(admission: AdmissionBackend, *requests: Request) -> list[str]:
    return [event.request_id async for event in admission.stream(*requests)]


def test_cancelled_while_waiting_the_stream_ends_without_the_backend() -> None:
    async def go() -> None:
        slow = Slow()
        admission = AdmissionBackend(slow, NARROW)
        inside = asyncio.ensure_future(collect(admission, request("inside")))
        waiting = asyncio.ensure_future(collect(admission, request("a"), request("b")))
        await asyncio.sleep(0)
        assert admission.stats().waiting == 2
        admission.cancel("a")
        assert admission.stats().waiting == 1 and slow.seen == ["inside"], "of two, one is left"
        admission.cancel("b")
        assert await waiting == []
        assert admission.explain("a") == {} and admission.stats().waiting == 0
        slow.let_go.set()
        assert await inside == ["inside"] and slow.seen == ["inside"]

    asyncio.run(go())


def test_what_is_left_of_a_visit_goes_through() -> None:
    async def go() -> None:
        slow = Slow()
        admission = AdmissionBackend(slow, NARROW)
        inside = asyncio.ensure_future(collect(admission, request("inside")))
        waiting = asyncio.ensure_future(collect(admission, request("a"), request("b")))
        await asyncio.sleep(0)
        admission.cancel("a")
        slow.let_go.set()
        assert await waiting == ["b"] and await inside == ["inside"]

    asyncio.run(go())


def test_refuse_serves_waiting_requests_but_no_new_ones() -> None:
    """A server that loses its supervisor ends what it has begun, and a request that waits has begun for its client."""

    async def go() -> None:
        slow = Slow()
        admission = AdmissionBackend(slow, NARROW)
        inside = asyncio.ensure_future(collect(admission, request("inside")))
        waiting = asyncio.ensure_future(collect(admission, request("waiting")))
        await asyncio.sleep(0)
        admission.refuse("going home")
        assert admission.num_open == 2 and not admission.alive
        with pytest.raises(EngineStopped, match="going home"):
            await collect(admission, request("late"))
        slow.let_go.set()
        assert await inside == ["inside"] and await waiting == ["waiting"]
        assert admission.num_open == 0 and slow.seen == ["inside", "waiting"]

    asyncio.run(go())


def test_a_task_cancelled_at_any_moment_leaves_admission_idle() -> None:
    async def go(turns: int) -> None:
        slow = Slow()
        admission = AdmissionBackend(slow, NARROW)
        tasks = [asyncio.ensure_future(collect(admission, request(str(n)))) for n in range(3)]
        for turn in range(turns):
            await asyncio.sleep(0)
            if turn == 2:
                slow.let_go.set()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert admission._admission.idle and not admission._open
        slow.let_go.set()
        assert await collect(admission, request("next")) == ["next"]

    for turns in range(8):
        asyncio.run(go(turns))


def test_a_pace_is_learned_from_prompts_of_less_than_a_millisecond() -> None:
    """On the loop that serves, whose own clock counts whole milliseconds."""

    async def go() -> float | None:
        fast = Slow()
        fast.let_go.set()
        admission = AdmissionBackend(fast)
        for number in range(4):
            assert await collect(admission, request(str(number))) == [str(number)]
        return admission._admission.predictor.tokens_per_s()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(go()) is not None


def test_a_refusal_is_remembered_for_a_while_and_not_for_ever() -> None:
    async def go() -> None:
        slow = Slow()
        admission = AdmissionBackend(slow, tenant_of=limited(tokens_per_minute=300))
        inside = asyncio.ensure_future(collect(admission, request("inside")))
        await asyncio.sleep(0)
        for number in range(1000):
            with pytest.raises(Overloaded):
                await collect(admission, request(f"r{number}"))
        assert "refused by admission control" in admission.explain("r999") and admission.explain("r0") == {}
        assert json.dumps(admission.explain("inside"))
        slow.let_go.set()
        await inside

    asyncio.run(go())


def test_a_request_that_only_has_to_be_read_holds_nothing_in_admission() -> None:
    """The engine has long made all of it: its tenant's slots are free, and `explain` still knows how it came in."""

    async def go() -> None:
        admission = AdmissionBackend(Ready(), room=lambda: Capacity(1, 2), tenant_of=limited())
        first = admission.stream(of("a", "first", n=2))
        await anext(first)
        assert await collect(admission, of("b", "other")) == ["other"], "two tenants compete from now on"
        second = asyncio.ensure_future(collect(admission, of("a", "second", n=2)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert second.done() and await second == ["second", "second"]
        assert "waited for admission" in admission.explain("first") and admission.num_open == 1
        assert [event.request_id async for event in first] == ["first"] and admission._admission.idle

    asyncio.run(go())


"""Has everything at once, and gives it to its reader."""


class Ready(Slow):
    """Has everything at once, and gives it to whoever reads."""

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        stream = TokenStream(requests, watcher)
        events = [TokenEvent(one.id, choice, 0, 1, "stop") for one in requests for choice in range(one.params.n)]
        for event in events:
            stream.put(event)
        for event in events:
            yield event


def of(tenant: str, request_id: str, **params: Any) -> Request:
    return replace(request(request_id), params=SamplingParams(**params), slo=Slo(tenant=tenant))
