"""A server of one process, built and run from Python: answers, access, and what an error leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import pytest

from engine.fake_program import PROGRAM
from tenants.serving import bearer, make_keys
from tripool.config import AdmissionConfig, EngineConfig, GatewayConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.process import EngineProcess
from tripool.errors import CheckpointMissing, DeviceOutOfMemory
from tripool.gateway.server import listen
from tripool.serving import AccessConfig, build_colocated
from tripool.serving.colocated import _admission

DEADLINE_S = 60.0
BODY = {"prompt": "hello", "max_tokens": 3}


def load(model: str, config: EngineConfig) -> PagedFake:
    if model != "fake":
        raise CheckpointMissing(f"no model '{model}'")
    return PagedFake(fake_text())


def test_it_asks_for_keys_admits_and_answers(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "alice")
    access, before = AccessConfig(tmp_path / "keys"), set(threading.enumerate())
    with build_colocated(["fake"], gateway=GatewayConfig(port=0), access=access, load=load) as server:
        with server.running(), httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 401
            answer = client.post("/v1/completions", json=BODY, headers=bearer(keys["alice"]))
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.models.alive
    assert not server.models.alive
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert "tripool-engine" not in left and "tripool-server" not in left


def test_an_error_frees_what_was_opened(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    access, gateway = AccessConfig(tmp_path / "keys", open=True), GatewayConfig(port=port)
    for _ in range(2):
        with pytest.raises(CheckpointMissing):
            build_colocated(["nonsense"], gateway=gateway, access=access, load=load)


OWN_PROCESS = (*PROGRAM, "engine")


def test_an_engine_in_a_process_of_its_own_answers_and_its_death_is_seen(tmp_path: Path) -> None:
    access = AccessConfig(tmp_path / "keys", open=True)
    with (
        build_colocated(
            ["fake:step_ms=5,context=100000"], gateway=GatewayConfig(port=0), access=access, engine_command=OWN_PROCESS
        ) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
    ):
        assert server.engine is not None and server.engine.name == "fake"
        assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 3
        assert client.get("/health").status_code == 200
        assert "vllm:num_requests_running" in client.get("/metrics").text
        endless = BODY | {"max_tokens": 90_000, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=endless) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data:")
            assert isinstance(server.engines, EngineProcess)
            os.kill(server.engines.pid, signal.SIGKILL)
            assert any("engine_stopped" in line for line in lines)
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_stopped"


def test_a_typed_error_of_the_engines_process_frees_what_was_opened(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        gateway = GatewayConfig(port=free.getsockname()[1])
    access = AccessConfig(tmp_path / "keys", open=True)
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match="lower --kv-gb"):
            build_colocated(["small-device"], gateway=gateway, access=access, engine_command=OWN_PROCESS)


@pytest.mark.prove
def test_models_are_loaded_and_unloaded_in_processes_of_their_own(tmp_path: Path) -> None:
    tripool = (sys.executable, "-m", "tripool", "engine")
    config, access = EngineConfig(threads=1, kv_gb=0.1), AccessConfig(tmp_path / "keys", open=True)
    with (
        build_colocated(
            ["tiny"], config, GatewayConfig(port=0), access=access, memory_gb=4.0, engine_command=tripool
        ) as server,
        server.running(),
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
    ):
        facts = []
        for _ in range(2):
            assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 3
            facts.append(server.models.control.describe("tiny"))
            held = server.engines.current("tiny")  # type: ignore[attr-defined]
            assert client.post("/v1/models/unload", json={"model": "tiny"}).status_code == 200
            with pytest.raises(ProcessLookupError):
                os.kill(held.pid, 0)
            assert client.post("/v1/models/load", json={"model": "tiny"}).status_code == 200
        assert [one["from_model_cache"] for one in facts] == [False, True]
        os.kill(server.engines.current("tiny").pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert client.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_stopped"
        assert client.get("/health").status_code == 503
        for verb in ("unload", "load"):
            assert client.post(f"/v1/models/{verb}", json={"model": "tiny"}).status_code == 200
        assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 3


def test_admission_lets_more_wait_before_an_engine_of_larger_steps() -> None:
    assert _admission(512) == AdmissionConfig(), "a CPU's"
    large = _admission(4096)
    assert (large.queue_tokens, large.wide_tokens) == (2_097_152, 16_384)
