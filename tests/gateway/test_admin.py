"""Health, readiness, load, drain and explain: what an operator and a load balancer rely on."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from gateway.serving import DEADLINE_S, GatedEngine

HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS = {"messages": HELLO, "ignore_eos": True, "stream": True}


def test_alive_and_ready(server):
    for path in ("/health", "/ping"):
        assert server.http.get(path).json() == {"status": "ok"}
    assert server.http.get("/health/ready").json() == {"status": "ready"}


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_ready_means_moving(serve):
    """The socket answers and the engine hangs: alive, not ready. Then it moves again."""
    clock, engine = ManualClock(), GatedEngine()
    with serve(engine=engine, clock=clock) as served:
        clock.now_s += 1000  # idle for long is no stall
        assert served.http.get("/health/ready").status_code == 200
        ended = threading.Event()

        def ask() -> None:
            served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3})
            ended.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert engine.wait_busy()
        clock.now_s += 19
        assert served.http.get("/health/ready").status_code == 200
        clock.now_s += 2
        response = served.http.get("/health/ready")
        assert response.status_code == 503
        assert "no step for 21.0 s" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "not_ready"
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/load").json()["server_load"] == 1
        engine.in_flight.set()
        assert ended.wait(DEADLINE_S)
        asking.join(DEADLINE_S)
        assert served.http.get("/health/ready").status_code == 200
        served.wait_empty()
        assert served.http.get("/load").json() == {
            "server_load": 0, "running": 0, "waiting": 0, "kv_usage": 0.0, "draining": False,
        }  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_neither(serve):
    with serve() as served:
        served.engine.fails.set()
        served.http.post("/v1/chat/completions", json={"messages": HELLO})
        for path in ("/health", "/ping", "/health/ready"):
            assert served.http.get(path).status_code == 503


@pytest.mark.parametrize("take_back", [("POST", "/drain?resume=true"), ("DELETE", "/drain")])
def test_drain_lets_streams_end_and_refuses_new_ones(serve, take_back):
    engine = GatedEngine(free_steps=2)
    with serve(engine=engine) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=ENDLESS | {"max_tokens": 9}) as response:
            lines = response.iter_lines()
            assert next(lines)
            assert served.http.post("/drain").json() == {"draining": True, "open_requests": 1}
            with pytest.raises(openai.InternalServerError) as caught:
                served.openai.chat.completions.create(model="fake", messages=HELLO)
            assert caught.value.code == "draining"
            assert int(caught.value.response.headers["retry-after"]) > 0
            refused = served.http.post("/v1/messages", json={})
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
            assert served.http.get("/health").status_code == 200
            assert served.http.get("/health/ready").status_code == 503
            engine.in_flight.set()
            assert list(lines)[-2] == "data: [DONE]"
        served.wait_empty()
        assert served.http.get("/drain").json() == {"draining": True, "open_requests": 0}
        assert served.http.request(*take_back).json()["draining"] is False
        assert served.http.get("/health/ready").status_code == 200
        assert served.openai.chat.completions.create(model="fake", messages=HELLO).choices


def test_a_page_of_another_site_cannot_drain(server):
    for method in ("POST", "DELETE"):
        response = server.http.request(method, "/drain", headers={"origin": "http://elsewhere.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "other_site")
    host = "{}:{}".format(*server.address)
    assert server.http.delete("/drain", headers={"origin": f"http://{host}"}).status_code == 200
    assert server.http.get("/drain").json()["draining"] is False


def test_a_wrong_query_is_a_400(server, check_refusal):
    check_refusal(server.http.post("/drain?resume=perhaps"), "resume")
    assert server.http.get("/drain").json()["draining"] is False


def test_explain(server):
    messages: Any = [{"role": "user", "content": "explained " * 40}]
    for _ in range(2):
        answer = server.openai.chat.completions.create(model="fake", messages=messages, n=2, max_tokens=3, seed=1)
    shown = server.http.get(f"/v1/requests/{answer.id}/explain").json()
    assert (shown["id"], shown["api"], shown["state"], shown["stream"]) == (
        answer.id,
        "chat",
        "finished",
        False,
    )
    assert shown["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens > 0
    assert (shown["prompt_tokens"], shown["completion_tokens"]) == (answer.usage.prompt_tokens, 6)
    assert shown["finish_reasons"] == {"length": 2}
    assert shown["timing"] == answer.model_extra["tripool"]["timing"]
    (placement,) = shown["placement"]
    assert placement.items() >= {"mode": "colocated", "engine": "fake", "waited for admission": "0.0 ms"}.items()
    assert "explained" not in str(shown)


def test_explain_by_the_clients_own_id(server):
    headers = {"X-Request-Id": "mine.1"}
    answer = server.openai.completions.create(model="fake", prompt="a", max_tokens=1, extra_headers=headers)
    assert (answer.id, answer._request_id) == ("cmpl-mine.1", "mine.1")
    assert server.http.get("/v1/requests/mine.1/explain").json()["id"] == "cmpl-mine.1"


def test_explain_says_what_became_of_a_request(serve, check_refusal):
    engine = GatedEngine(free_steps=3)
    with serve(engine=engine) as served:
        body = ENDLESS | {"request_id": "gone"}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # kept: an iterator that is dropped hangs up
            assert next(lines)
            assert served.http.get("/v1/requests/gone/explain").json()["state"] == "open"
        engine.in_flight.set()
        assert engine.wait_idle()
        served.http.post("/v1/completions", json={"prompt": [10**6], "request_id": "bad"})
        shown = served.http.get("/v1/requests/bad/explain").json()
        assert (shown["state"], shown["error"]) == ("failed", "invalid_request")
        served.wait_empty()
        assert served.http.get("/v1/requests/gone/explain").json()["state"] == "cancelled"
        unknown = served.http.get("/v1/requests/nobody/explain")
        check_refusal(unknown, None, status=404)
        assert unknown.json()["error"]["code"] == "request_unknown"
