"""Several gateways on one port are one server; and a client whose gateway dies takes its answer up where it was."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from . import faults
from .pinned import pinned
from .serving import DEADLINE_S, SplitServer, split_server
from .streams import expected

MODEL = "fake:step_ms=10"
GATEWAYS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server(MODEL, options=("--gateways", str(GATEWAYS), "--response-store-mb", "3")) as running:
        yield running


def documented_wrapper(pytestconfig: pytest.Config) -> Callable[..., Iterator[Any]]:
    """The one of docs/http.md."""
    text = (pytestconfig.rootpath / "docs" / "http.md").read_text("utf-8")
    found = re.search(r"```python\n(import.*?def stream\(.*?)```", text, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found[1], names)
    wrapper: Callable[..., Iterator[Any]] = names["stream"]
    return wrapper


def test_the_openai_client_with_the_documented_wrapper_survives_every_gateway(
    server: SplitServer, pytestconfig: pytest.Config
) -> None:
    stream = documented_wrapper(pytestconfig)
    asked = {"model": "fake", "max_tokens": 150, "extra_body": {"ignore_eos": True}, "n": 2}
    asked["messages"] = [{"role": "user", "content": "hello"}]
    got: dict[int, list[Any]] = {}

    def read(number: int) -> None:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5)
        got[number] = [chunk for chunk in stream(client, f"key-{number}", **asked) if got.setdefault(number, []) == []]

    began = threading.Barrier(9)

    def run(number: int) -> None:
        began.wait(DEADLINE_S)
        read(number)

    readers = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    began.wait(DEADLINE_S)
    server.wait(lambda pools: pools["requests"] == 8)
    for pid in server.all("gateway"):
        faults.kill(pid)
        server.wait(lambda pools, pid=pid: len(pools["gateways"]) == GATEWAYS and pid not in server.all("gateway"))
    for reader in readers:
        reader.join(DEADLINE_S)
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for number in range(8):
        again = list(stream(client, f"key-{number}", **asked))
        texts = [by_choice(got[number]), by_choice(again)]
        assert texts[0] == texts[1] and len(texts[0]) == 2
        assert {chunk.id for chunk in got[number]} == {chunk.id for chunk in again}, "another id"
        assert {chunk.created for chunk in got[number]} == {chunk.created for chunk in again}
    server.wait_idle(2)


def by_choice(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def test_a_stream_that_was_cut_goes_on_at_another_gateway(server: SplitServer) -> None:
    """With Last-Event-ID and nothing else; the tokens are those of an engine alone."""
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "seed": 4, "n": 2}
    extra = {"stream": True, "return_token_ids": True}
    tokens: dict[int, list[int]] = {}
    with pinned(server) as clients:
        last, turn = "", itertools.cycle(clients)
        for _ in range(4):
            headers = {"Idempotency-Key": "cut"} | ({"Last-Event-ID": last} if last else {})
            client = next(turn)
            with client.stream("POST", "/v1/completions", json=body | extra, headers=headers) as response:
                assert response.status_code == 200
                lines, wanted = response.iter_lines(), 20
                for line in lines:
                    if line.startswith("id: "):
                        last = line.removeprefix("id: ")
                    elif line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        tokens.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
                        wanted -= 1
                    elif not line and wanted <= 0 and last:
                        break  # and hang up
    rest = server.http.post(
        "/v1/completions", json=body | extra, headers={"Idempotency-Key": "cut", "Last-Event-ID": last}
    ).text
    for line in rest.split("\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert tokens == expected(body)


def test_what_one_gateway_knows_the_others_say(server: SplitServer) -> None:
    """Explanations, stored responses and their items, cancelling, load."""
    with pinned(server) as (one, two, three):
        answer = one.post("/v1/completions", json={"prompt": [5], "max_tokens": 3})
        request_id = answer.headers["x-request-id"]
        told = [client.get(f"/v1/requests/{request_id}/explain").json()["key"] for client in (one, two, three)]
        assert len(set(told)) == 1
        assert two.get("/v1/requests/nothing/explain").status_code == 404

        asked = {"input": "hello", "max_output_tokens": 8, "store": True}
        first = one.post("/v1/responses", json=asked).json()
        second = two.post("/v1/responses", json=asked | {"previous_response_id": first["id"]}).json()
        third = three.post("/v1/responses", json=asked | {"previous_response_id": second["id"]}).json()
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert one.get(f"/v1/responses/{third['id']}").json()["id"] == third["id"]
        items = two.get(f"/v1/responses/{third['id']}/input_items").json()["data"]
        assert len(items) == 1
        assert one.delete(f"/v1/responses/{third['id']}").json()["deleted"]
        assert [client.get(f"/v1/responses/{third['id']}").status_code for client in (one, two, three)] == [404] * 3
        gone = two.post("/v1/responses", json=asked | {"previous_response_id": third["id"]})
        assert gone.json()["error"]["code"] == "previous_response_not_found"

        long = {"input": "hello", "max_output_tokens": 2000, "ignore_eos": True, "stream": True}
        with one.stream("POST", "/v1/responses", json=long) as response:
            lines = response.iter_lines()
            created = next(line for line in lines if line.startswith("data: "))
            response_id = json.loads(created.removeprefix("data: "))["response"]["id"]
            assert two.get("/load").json()["server_load"] == 1
            assert three.get(f"/v1/responses/{response_id}").json()["status"] == "in_progress"
            assert two.post(f"/v1/responses/{response_id}/cancel").json()["status"] == "cancelled"
            assert any("response.incomplete" in line or "response.completed" in line for line in lines)
    server.wait_idle(2)


def test_counters_are_each_gateways_own_and_all_are_shown(server: SplitServer) -> None:
    with pinned(server) as clients:
        before = [requests_of(client) for client in clients]
        for number, client in enumerate(clients):
            for _ in range(number + 1):
                client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}).raise_for_status()
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            after = [requests_of(client) for client in clients]
            new = [
                sorted(found[name] - old.get(name, 0) for name in found)
                for found, old in zip(after, before, strict=True)
            ]
            if new == [[1, 2, 3]] * 3:
                break
            assert time.monotonic() < deadline_s, new


def requests_of(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a metric comes twice"
    running = [s for family in families for s in family.samples if s.name == "tripool_choices_running"]
    assert len(running) == 1 and "gateway" not in running[0].labels, "what the coordinator counts is counted once"
    samples = [s for family in families for s in family.samples if s.name == "tripool_requests_total"]
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.labels["gateway"]] = found.get(sample.labels["gateway"], 0) + sample.value
    return found


def test_draining_one_drains_all_and_those_to_come(server: SplitServer) -> None:
    body = {"prompt": [5], "max_tokens": 2}
    try:
        assert server.http.post("/drain").json() == {"draining": True, "open_requests": 0}
        with pinned(server) as clients:
            assert [client.post("/v1/completions", json=body).status_code for client in clients] == [503] * GATEWAYS
        victim = server.all("gateway")[0]
        faults.kill(victim)
        server.wait(lambda pools: len(pools["gateways"]) == GATEWAYS and victim not in server.all("gateway"))
        leader = server.pools()["coordinator_pid"]
        faults.kill(leader)
        server.wait(lambda pools: pools["coordinator_pid"] != leader and len(pools["gateways"]) == GATEWAYS)
        with pinned(server) as clients:
            assert [client.post("/v1/completions", json=body).status_code for client in clients] == [503] * GATEWAYS
    finally:
        assert server.http.delete("/drain").json() == {"draining": False, "open_requests": 0}
    with pinned(server) as clients:
        assert [client.post("/v1/completions", json=body).status_code for client in clients] == [200] * GATEWAYS


def test_connections_wait_for_a_living_gateway(server: SplitServer) -> None:
    """One is stopped, one is killed: of requests on new connections none is lost."""
    stopped, killed, _ = server.all("gateway")
    faults.stop(stopped)
    faults.kill(killed)
    try:
        for number in range(30):
            answer = server.http.post("/v1/completions", json={"prompt": [5, number], "max_tokens": 2})
            assert answer.status_code == 200
    finally:
        faults.wake(stopped)
    server.wait(lambda pools: len(pools["gateways"]) == GATEWAYS)


def test_rates_and_usage_are_one_over_all_gateways(tmp_path: Path) -> None:
    """A repeat counts for no limit, and its tokens are logged once, whatever dies meanwhile."""
    keys = tmp_path / "keys.db"

    def tripool(*argv: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tripool", *argv, "--keys", str(keys)], capture_output=True, text=True, check=True
        ).stdout

    key = tripool("keys", "add", "alice", "--rpm", "4").strip()
    admin = tripool("keys", "add", "ops", "--admin").strip()
    bearer = {"Authorization": f"Bearer {admin}"}
    options = ("--gateways", "3", "--keys", str(keys))
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}

    def wait_for_usage(**wanted: tuple[int, int, int]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            rows = json.loads(tripool("usage", "--by", "tenant", "--json"))
            used = {row["tenant"]: (row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows}
            if used == wanted:
                return
            assert time.monotonic() < deadline_s, used
            time.sleep(0.1)

    with split_server(MODEL, options=options, headers=bearer) as server:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "one"}
        with pinned(server, headers={"Authorization": f"Bearer {key}"}) as clients:
            whole = clients[0].post("/v1/completions", json=body, headers=headers).json()
            for client in clients * 3:
                again = client.post("/v1/completions", json=body, headers=headers)
                assert again.status_code == 200 and again.json()["choices"] == whole["choices"]
            plain = [client.post("/v1/completions", json=body | {"seed": 1}).status_code for client in clients * 2]
            assert sorted(plain) == [200, 200, 200, 429, 429, 429], "one of four was the key's"
        wait_for_usage(alice=(4, 12, 160))  # a killed gateway may lose the last second of what has no key
        # A gateway dies while it streams, and nobody comes back: what was made is logged all the same, once.
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True, "max_tokens": 300},
            headers={"Authorization": f"Bearer {admin}", "Idempotency-Key": "two"}, timeout=DEADLINE_S,
        ) as response:  # fmt: skip
            parts = response.iter_lines()
            next(parts)
            for pid in server.all("gateway"):
                faults.kill(pid)
            with pytest.raises(httpx.HTTPError):
                for _ in parts:
                    pass
        server.wait(lambda pools: pools["requests"] == 0)
        wait_for_usage(alice=(4, 12, 160), ops=(1, 3, 300))


def test_one_gateway_runs_batches_and_the_next_one_goes_on(tmp_path: Path) -> None:
    options = ("--gateways", "2", "--batch-dir", str(tmp_path / "batches"))
    with split_server("fake:step_ms=2", options=options) as server:
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": [5, i], "max_tokens": 4},
            }
            for i in range(60)
        ]
        with pinned(server) as clients:
            files = {"file": ("in", "\n".join(map(json.dumps, lines)).encode()), "purpose": (None, "batch")}
            file_id = clients[0].post("/v1/files", files=files).json()["id"]
            asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = clients[1].post("/v1/batches", json=asked).json()
            while clients[0].get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] < 5:
                time.sleep(0.01)
        for pid in server.all("gateway"):
            faults.kill(pid)
            server.wait(lambda pools, pid=pid: len(pools["gateways"]) == 2 and pid not in server.all("gateway"))
        deadline_s = time.monotonic() + DEADLINE_S
        while (now := server.http.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
            assert time.monotonic() < deadline_s, now
            time.sleep(0.05)
        output = server.http.get(f"/v1/files/{now['output_file_id']}/content").text
        assert [json.loads(line)["custom_id"] for line in output.splitlines()] == [str(i) for i in range(60)]
        assert now["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


def test_errors_of_keys_are_the_same_split(server: SplitServer) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "fake", "prompt": "hello", "max_tokens": 3}
    client.completions.create(**asked, extra_headers={"Idempotency-Key": "e"})
    with pytest.raises(openai.UnprocessableEntityError, match="another request"):
        client.completions.create(**asked | {"max_tokens": 4}, extra_headers={"Idempotency-Key": "e"})
    with pytest.raises(openai.BadRequestError, match="no id of an event"):
        client.completions.create(
            **asked | {"stream": True}, extra_headers={"Idempotency-Key": "f", "Last-Event-ID": "x"}
        )
