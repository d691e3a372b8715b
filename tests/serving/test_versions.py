"""Versions of a registered model behind one name over HTTP: canaries publish or roll back, the pointer is followed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from batch.pipeline_case import BROKEN_TEMPLATE, small_checkpoint
from tripool.checkpoints import Registry
from tripool.config import EngineConfig, GatewayConfig
from tripool.serving import build_colocated, build_split
from tripool.serving.split import SplitConfig

WITHIN_S = 60.0
PLAN = {"share": 0.5, "requests": 6, "min_requests": 6, "seconds": 600, "max_slowdown": 0}
LONG = "The fox ran to the river and the rain came down. " * 12


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """Version 1 published; 2 as good; in 3 the chat template is broken, which no perplexity shows."""
    folder = tmp_path_factory.mktemp("registry")
    registry = Registry(folder / "registry")
    good = small_checkpoint(folder / "good")
    broken = small_checkpoint(folder / "broken", BROKEN_TEMPLATE)
    for number, source in enumerate((good, good, broken), 1):
        assert registry.add("story", source, {}, key=f"key {number}").number == number
    registry.publish("story", 1)
    return registry


@pytest.fixture
def client(registry: Registry) -> Iterator[httpx.Client]:
    registry.publish("story", 1)
    engine = EngineConfig(kv_gb=0.01, threads=1)
    with (
        build_colocated(
            [f"{registry.folder}/story"], engine, GatewayConfig(port=0, response_store_bytes=2**20)
        ) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=WITHIN_S) as client,
    ):
        yield client


def talk(client: httpx.Client, first: str, *more: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": first}]
    for turn in more:
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": turn}]
    body = {"model": "story", "messages": messages, "max_tokens": 2, **fields}
    return client.post("/v1/chat/completions", json=body)


def until(client: httpx.Client, *states: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        found: dict[str, Any] = client.get("/v1/canary/story").json()
        if found["state"] in states:
            return found
        assert time.monotonic() < deadline_s, found


def serves(client: httpx.Client, version: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while client.get("/v1/canary/story").json()["serves"] != version:
        assert time.monotonic() < deadline_s


def begin(client: httpx.Client, number: int, **more: Any) -> None:
    answer = client.post("/v1/canary/story", json={"version": number, **PLAN, **more})
    assert answer.status_code == 200, answer.text
    until(client, "running")


def test_a_good_version_is_published_and_a_conversation_stays_on_one_side(
    client: httpx.Client, registry: Registry
) -> None:
    begin(client, 2, id="one", requests=40)
    assert client.post("/v1/canary/story", json={"version": 2, **PLAN, "id": "one"}).json()["state"] == "running"
    assert client.post("/v1/canary/story", json={"version": 3, **PLAN}).status_code == 409
    sides = set()
    for number in range(8):
        first = f"Conversation {number}"
        versions = {
            talk(client, first).json()["model"],
            talk(client, first, "and then?").json()["model"],
            talk(client, first, "and then?", "why?").json()["model"],
        }
        if client.get("/v1/canary/story").json()["state"] == "running":
            assert len(versions) == 1, versions
            sides |= versions
    assert sides == {"story@1", "story@2"}
    for number in range(8):
        body = {"model": "story", "max_output_tokens": 2, "input": f"Response {number}"}
        before = client.post("/v1/responses", json=body).json()
        after = client.post("/v1/responses", json=body | {"input": "And?", "previous_response_id": before["id"]}).json()
        assert after["model"] == before["model"]
    number = 100
    while client.get("/v1/canary/story").json()["state"] == "running":
        talk(client, f"Conversation {number}")
        number += 1
    found = until(client, "published")
    assert found["serves"] == "story@2" and found["new"]["errors"] == 0
    assert registry.published("story") == 2
    assert {talk(client, f"Later {i}").json()["model"] for i in range(6)} == {"story@2"}
    assert {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}["story"] == "ready"


def test_a_bad_version_is_rolled_back(client: httpx.Client, registry: Registry) -> None:
    begin(client, 3)
    failed = 0
    for number in range(200):
        answer = talk(client, f"Conversation {number}")
        failed += answer.status_code != 200
        if client.get("/v1/canary/story").json()["state"] != "running":
            break
    found = until(client, "rolled_back")
    assert 0 < failed <= PLAN["requests"], "no more than the bar costs"
    assert "failed" in found["reason"] and found["serves"] == "story@1"
    assert registry.published("story") == 1
    assert all(talk(client, f"Conversation {number}").status_code == 200 for number in range(8))


def test_versions_never_read_each_others_blocks(client: httpx.Client) -> None:
    def cached(model: str) -> int:
        usage = talk(client, LONG, model=model).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("story@1") == 0
    assert cached("story@1") > 0
    begin(client, 2)
    assert cached("story@2") == 0
    assert cached("story@2") > 0


def test_servers_follow_the_pointer_and_its_way_back(client: httpx.Client, registry: Registry) -> None:
    registry.publish("story", 2)
    serves(client, "story@2")
    assert talk(client, "Hello").json()["model"] == "story@2"
    assert registry.roll_back("story") == 1
    serves(client, "story@1")
    assert talk(client, "Hello").json()["model"] == "story@1"


def test_an_operator_ends_a_canary_and_what_cannot_be_tried_is_refused(client: httpx.Client) -> None:
    begin(client, 2)
    assert client.delete("/v1/canary/story").json()["state"] == "rolled_back"
    for body, status in (
        ({"version": 9}, 404),
        ({"version": 1}, 400),
        ({"version": 2, "share": 1.5}, 400),
        ({"version": 2, "content": "another"}, 400),
        ({}, 400),
    ):
        assert client.post("/v1/canary/story", json=body).status_code == status, body
    assert client.get("/v1/canary/tiny").status_code == 404


@pytest.mark.prove
def test_a_split_server_tries_and_follows_the_versions_that_it_was_started_with(registry: Registry) -> None:
    registry.publish("story", 1)
    models = [f"{registry.folder}/{name}" for name in ("story", "story@2")]
    pools = SplitConfig(cache_gb=0.0)
    with (
        build_split(models, EngineConfig(kv_gb=0.01, threads=1), GatewayConfig(port=0), pools=pools) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=WITHIN_S) as client,
    ):
        assert {talk(client, f"Before {number}").json()["model"] for number in range(6)} == {"story@1"}
        begin(client, 2, requests=20, min_requests=5)
        answers = [talk(client, f"Conversation {number}") for number in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["model"] for answer in answers} == {"story@1", "story@2"}
        number = 100
        while client.get("/v1/canary/story").json()["state"] == "running":
            talk(client, f"Conversation {number}")
            number += 1
        assert until(client, "published")["serves"] == "story@2" and registry.published("story") == 2
        assert registry.roll_back("story") == 1
        serves(client, "story@1")
        assert talk(client, "Hello").json()["model"] == "story@1"
        client.post("/v1/canary/story", json={"version": 3, **PLAN})
        assert "was started without" in until(client, "rolled_back")["reason"]
        registry.publish("story", 3)
        assert talk(client, "Hello").json()["model"] == "story@1", "and it goes on"
