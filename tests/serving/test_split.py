"""Several models behind one gateway, each with workers and cache members of its own; built and run from Python."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from split.streams import expected, make_bodies
from tripool import LLM, SamplingParams
from tripool.config import EngineConfig, GatewayConfig
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import CheckpointMissing, InvalidRequest, ModelNotFound
from tripool.fabric.folder import coordinator_address
from tripool.gateway.server import listen
from tripool.messages import WorkerId
from tripool.serving import AccessConfig, build_split
from tripool.serving.split import SplitConfig
from tripool.serving.worker import WorkerProcess

DEADLINE_S = 120.0
SMALL = EngineConfig(threads=1, kv_gb=0.02)
PROMPT = "Once upon a time there was a small pool. " * 12


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    access = AccessConfig(tmp_path_factory.mktemp("keys") / "keys", open=True)
    with (
        build_split(["fake", "tiny"], SMALL, GatewayConfig(port=0), access=access) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as http,
    ):
        deadline_s = time.monotonic() + DEADLINE_S
        while not complete(http.get("/v1/pools").json()):
            assert time.monotonic() < deadline_s
        yield http


def complete(pools: dict[str, Any]) -> bool:
    return len(pools["workers"]) == 4 and not any(member["away"] for member in pools["cache"])


def test_each_model_has_its_own_workers_and_cache_members(client: httpx.Client) -> None:
    pools = client.get("/v1/pools").json()
    workers = {worker["worker"]: worker["model"] for worker in pools["workers"]}
    assert workers == {"prefill-0": "fake", "decode-0": "fake", "prefill-1": "tiny", "decode-1": "tiny"}
    assert [member["member"] for member in pools["cache"]] == ["cache-0", "cache-1", "cache-2", "cache-3"]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["fake", "tiny"]


def test_a_request_reaches_the_pool_of_its_model(client: httpx.Client) -> None:
    (body,) = make_bodies(1, prompt_tokens=40, answer_tokens=12)
    for named in ({}, {"model": "fake"}):
        answer = client.post("/v1/completions", json=body | named | {"return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == expected(body)[0], "the first model is the default"
    with LLM("tiny", threads=1, kv_gb=0.02) as llm:
        want = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))[0].choices[0].text
    greedy = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answers = [client.post("/v1/completions", json=greedy).json() for _ in range(2)]
    assert [answer["choices"][0]["text"] for answer in answers] == [want, want]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    unknown = client.post("/v1/completions", json=greedy | {"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_a_worker_of_another_model_does_not_join(tmp_path: Path) -> None:
    RunManifest((ServedModel("tiny", fake_text()),)).write(tmp_path)
    engine = PagedFake(fake_text(), num_blocks=64)
    with pytest.raises(ModelNotFound, match="no model 'fake'"):
        WorkerProcess(engine, "decode", WorkerId("decode-9", 1), coordinator_address(tmp_path))


def test_what_cannot_be_served_is_an_error_before_a_process_starts(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    access, gateway = AccessConfig(tmp_path / "keys", open=True), GatewayConfig(port=port)
    for _ in range(2):  # the port is free again after an error
        with pytest.raises(InvalidRequest, match="two models are named 'fake'"):
            build_split(["fake", "fake:blocks=64"], SMALL, gateway, access=access)
        with pytest.raises(CheckpointMissing):
            build_split(["fake", "nonsense"], SMALL, gateway, pools=SplitConfig(cache_gb=0), access=access)
