"""Several models behind one gateway: named, loaded when wanted, unloaded when idle, waited for within a bound."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from gateway.serving import DEADLINE_S, FRESH, GatedEngine, WatchedEngine
from tripool.config import GatewayConfig
from tripool.control.model_policy import ModelPolicy
from tripool.engine.fake import fake_text
from tripool.engine.thread import EngineThread
from tripool.errors import CheckpointMissing
from tripool.gateway.model_manager import ManagedBackend, ModelManager
from tripool.gateway.models import Models, Served
from tripool.gateway.server import listen
from tripool.serving.colocated import ColocatedServer
from tripool.text import Tokenizer

MB = 10**6


@dataclass
class FakeResident:
    backend: EngineThread
    num_bytes: int
    from_memory: bool = False

    def close(self, timeout_s: float) -> bool:
        return self.backend.close(timeout_s)


@dataclass
class House:
    """Fake engines by name, and what was opened of them. `gates`: a model opens only when its gate does."""

    sizes: dict[str, int]
    engines: dict[str, list[WatchedEngine]] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    """Models whose engines wait after their first token."""
    opening: threading.Event = field(default_factory=threading.Event)

    def open(self, name: str) -> FakeResident:
        self.opening.set()
        if name in self.gates:
            assert self.gates[name].wait(DEADLINE_S)
        if name in self.broken:
            raise CheckpointMissing(f"no model '{name}'", hint="put it back")
        engine = GatedEngine(free_steps=2) if name in self.gated else WatchedEngine()
        engine.name = name
        self.engines.setdefault(name, []).append(engine)
        return FakeResident(EngineThread(engine), self.sizes[name])


@contextmanager
def serving(house: House, budget: int | None, *, wait_s: float = DEADLINE_S, drain_s: float = DEADLINE_S):
    manager = ModelManager(ModelPolicy(house.sizes, budget), house.open, wait_s=wait_s, drain_s=drain_s)
    tokenizer = Tokenizer(fake_text())
    served = [Served(name, ManagedBackend(manager, name, 2048), tokenizer) for name in house.sizes]
    with (
        listen("127.0.0.1", 0) as listener,
        ColocatedServer(Models(served, manager), manager, listener, GatewayConfig()) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=2 * DEADLINE_S, limits=FRESH) as http,
    ):
        yield http


def say(http: httpx.Client, model: str | None, **more) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 3, "seed": 1} | ({} if model is None else {"model": model}) | more
    return http.post("/v1/completions", json=body)


def states(http: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}


def load(http: httpx.Client, model: str) -> str | None:
    """Its state afterwards, if it was there in time."""
    return http.post("/v1/models/load", json={"model": model}).json().get("state")


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s


def is_gone(engine: weakref.ref[WatchedEngine]) -> bool:
    gc.collect()
    return engine() is None


@pytest.fixture
def house() -> House:
    return House({"one": 4 * MB, "two": 4 * MB, "three": 9 * MB})


def test_a_request_names_its_model_and_the_first_is_the_default(house):
    with serving(house, None) as http:
        assert [say(http, name).json()["model"] for name in ("two", None, "one")] == ["two", "one", "one"]
        unknown = say(http, "four")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'one', 'two', 'three'" in unknown.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "model": 5}).status_code == 400
        json_type = {"content-type": "application/json"}
        assert http.post("/v1/completions", content="{", headers=json_type).status_code == 400
        assert http.post("/tokenize", json={"model": "four", "prompt": "a"}).status_code == 404
        assert http.post("/tokenize", json={"model": "three", "prompt": "a"}).json()["count"] == 1
        chat = {"model": "two", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        assert http.post("/v1/messages", json=chat).json()["model"] == "two"


def test_models_are_listed_with_their_state(house):
    with serving(house, None) as http:
        assert states(http) == dict.fromkeys(house.sizes, "unloaded")
        say(http, "two")
        assert states(http) == {"one": "unloaded", "two": "ready", "three": "unloaded"}
        until(lambda: not http.get("/load").json()["server_load"])
        shown = http.get("/v1/models/two").json()
        assert (shown["default"], shown["bytes"], shown["open"]) == (False, 4 * MB, 0)
        assert http.get("/v1/models/four").status_code == 404


def test_the_one_used_longest_ago_makes_room(house):
    with serving(house, 10 * MB) as http:
        for name in ("one", "two", "one"):
            assert say(http, name).status_code == 200
        assert say(http, "three").status_code == 200
        assert states(http) == {"one": "unloaded", "two": "unloaded", "three": "ready"}
        assert say(http, "one").status_code == 200
        assert states(http) == {"one": "ready", "two": "unloaded", "three": "unloaded"}
        assert {name: len(engines) for name, engines in house.engines.items()} == {"one": 2, "two": 1, "three": 1}


def test_a_busy_model_is_never_unloaded_and_the_answer_says_what_is_missing(house):
    house.gated.add("one")
    with serving(house, 10 * MB, wait_s=0.2) as http:
        until(lambda: load(http, "one") == "ready")
        body = {"model": "one", "prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 20}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            for refused in (http.post("/v1/models/load", json={"model": "three"}), say(http, "three")):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
                assert "0.003 GB are missing" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
            assert states(http)["one"] == "ready"
            house.engines["one"][0].in_flight.set()
            assert list(lines)[-2] == "data: [DONE]"
        until(lambda: load(http, "three") == "ready")


def test_what_would_not_fit_alone_is_refused_at_once(house):
    with serving(house, 5 * MB) as http:
        refused = say(http, "three")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "model_too_large")


def test_requests_wait_for_a_model_that_is_being_loaded(house):
    in_flight = house.gates["one"] = threading.Event()
    with serving(house, None) as http:
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(say(http, "one"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert house.opening.wait(DEADLINE_S)
        assert states(http)["one"] == "loading"
        in_flight.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len(house.engines["one"]) == 1


def test_waiting_has_a_bound(house):
    in_flight = house.gates["one"] = threading.Event()
    with serving(house, None, wait_s=0.05) as http:
        refused = say(http, "one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert int(refused.headers["retry-after"]) >= 1
        in_flight.set()


def test_a_model_that_cannot_be_loaded_says_why_and_can_be_tried_again(house):
    house.broken.add("two")
    with serving(house, None) as http:
        for answer in (say(http, "two"), http.post("/v1/models/load", json={"model": "two"})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "checkpoint_missing")
        shown = http.get("/v1/models/two").json()
        assert shown["state"] == "failed" and "put it back" in shown["error"]
        house.broken.clear()
        assert http.post("/v1/models/load", json={"model": "two"}).json()["state"] == "ready"
        assert "error" not in http.get("/v1/models/two").json()


def test_unloading_lets_open_answers_end_and_nothing_stays_behind(house):
    house.gated.add("one")
    before = set(threading.enumerate())
    with serving(house, None) as http:
        body = {"model": "one", "prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 20}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            shown: list[httpx.Response] = []
            unload = threading.Thread(
                target=lambda: shown.append(http.post("/v1/models/unload", json={"model": "one"}))
            )
            unload.start()
            until(lambda: states(http)["one"] == "draining")
            refused = say(http, "one")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unloaded")
            house.engines["one"][0].in_flight.set()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        unload.join(DEADLINE_S)
        assert shown[0].json()["state"] == "unloaded"
        engine = weakref.ref(house.engines.pop("one")[0])
        until(lambda: is_gone(engine))  # the server lets go of an answer a moment after its client has it
        assert not any(thread.name == "tripool-engine" for thread in set(threading.enumerate()) - before)
        assert say(http, "one").json()["error"]["code"] == "model_unloaded"
        assert http.post("/v1/models/load", json={"model": "one"}).json()["state"] == "ready"
    assert not any(thread.name.startswith("tripool") for thread in set(threading.enumerate()) - before)


def test_an_unload_that_takes_long_says_so_and_goes_on(house):
    house.gated.add("one")
    with serving(house, None, drain_s=0.05) as http:
        body = {"model": "one", "prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 20}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            shown = http.post("/v1/models/unload", json={"model": "one"}).json()
            assert (shown["state"], shown["open"]) == ("draining", 1)
            assert http.post("/v1/models/load", json={"model": "one"}).json()["state"] == "ready"
            house.engines["one"][0].in_flight.set()
            list(lines)
        assert states(http)["one"] == "ready"


def test_a_client_that_hangs_up_while_waiting_is_forgotten(house):
    in_flight = house.gates["one"] = threading.Event()
    with serving(house, None) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"model": "one", "prompt": "a"}, timeout=0.2)
        in_flight.set()
        assert say(http, "one").status_code == 200
        until(lambda: not http.get("/load").json()["server_load"])
        assert http.get("/v1/models/one").json()["open"] == 0


def test_counters_go_on_over_loads_and_every_model_has_its_own(house):
    with serving(house, None) as http:
        say(http, "one")
        for verb in ("unload", "load"):
            http.post(f"/v1/models/{verb}", json={"model": "one"})
        say(http, "one")
        say(http, "two")
        until(lambda: not http.get("/load").json()["server_load"])
        text = http.get("/metrics").text
    found = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if not line.startswith("#")}
    assert found['tripool_completion_tokens_total{model_name="one"}'] == 6
    assert found['tripool_completion_tokens_total{model_name="two"}'] == 3
    assert found['tripool_steps_total{model_name="one"}'] >= 6
    assert text.count("# HELP tripool_steps_total") == 1


def test_a_page_of_another_site_cannot_unload(house):
    with serving(house, None) as http:
        headers = {"origin": "http://evil.example"}
        refused = http.post("/v1/models/unload", json={"model": "one"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "other_site")


def test_a_server_of_one_model_does_not_unload_it(server):
    assert server.http.post("/v1/models/load", json={"model": "fake"}).json()["state"] == "ready"
    refused = server.http.post("/v1/models/unload", json={"model": "fake"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_stays")
    assert server.http.post("/v1/models/load", json={}).status_code == 400


def test_one_that_was_opened_before_the_loop_is_there_and_another_is_preferred_only_if_it_fits(house):
    manager = ModelManager(ModelPolicy(house.sizes, 10 * MB), house.open)
    manager.add("one", house.open("one"), 0.5)

    async def start() -> dict[str, str]:
        for name in ("two", "three"):
            manager.prefer(name)
        await manager.load("two")
        return {name: manager.describe(name)["state"] for name in house.sizes}

    assert asyncio.run(start()) == {"one": "ready", "two": "ready", "three": "unloaded"}
    manager.close(DEADLINE_S)
