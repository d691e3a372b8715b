"""A server of one process, built and run from Python: answers, access, and what an error leaves behind."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tenants.serving import bearer, make_keys
from tripool.config import EngineConfig, GatewayConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import CheckpointMissing
from tripool.gateway.server import listen
from tripool.serving import AccessConfig, build_colocated

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
