"""A gateway that joins from another host: its own address, and everything else is the server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from hosts.joining import Host, join_line, joined
from split.serving import DEADLINE_S, SplitServer, split_server
from split.streams import Asked, expected

KEY_DEADLINE_S = 30.0


def tripool(keys: Path, *argv: str) -> str:
    command = [sys.executable, "-m", "tripool", *argv, "--keys", str(keys)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def url_of(host: Host) -> str:
    return next(line.split()[1] for line in host.said if line.startswith("ready")).removesuffix("/v1")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.db"


@pytest.fixture(scope="module")
def alice(keys: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {tripool(keys, 'keys', 'add', 'alice', '--rpm', '30').strip()}"}


@pytest.fixture(scope="module")
def servers(keys: Path, alice: dict[str, str]) -> Iterator[tuple[SplitServer, Host, httpx.Client]]:
    admin = {"Authorization": f"Bearer {tripool(keys, 'keys', 'add', 'ops', '--admin').strip()}"}
    options = ("--listen", "127.0.0.1:0", "--cache-gb", "0", "--keys", str(keys))
    fresh = httpx.Limits(max_keepalive_connections=0)
    with split_server("fake:step_ms=5", options=options, headers=admin) as server, ExitStack() as stack:
        words = [*join_line(server), "--role", "gateway", "--host", "127.0.0.2", "--port", "0"]
        host = stack.enter_context(joined(words))
        server.wait(lambda pools: len(pools["gateways"]) == 2)
        client = httpx.Client(base_url=url_of(host), timeout=DEADLINE_S, headers=alice, limits=fresh)
        http = stack.enter_context(client)
        deadline_s = time.monotonic() + KEY_DEADLINE_S
        while http.get("/v1/models").status_code == 503:  # it asks for the keys once a second
            assert time.monotonic() < deadline_s
        yield server, host, http


BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "seed": 3}


def test_it_answers_as_the_server_does(servers: tuple[SplitServer, Host, httpx.Client], keys: Path) -> None:
    server, _, http = servers
    answer = http.post("/v1/completions", json=BODY | {"return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == expected(Asked(BODY).body)[0]
    assert httpx.post(f"{http.base_url}/v1/completions", json=BODY).status_code == 401
    assert http.get("/metrics").status_code == 403, "a tenant's key is no operator's there either"
    told = server.http.get(f"/v1/requests/{answer['id']}/explain")
    assert told.status_code == 200, "the server's gateway asks it"

    def used() -> Any:
        rows = json.loads(tripool(keys, "usage", "--by", "tenant", "--json"))
        return next(((row["requests"], row["completion_tokens"]) for row in rows if row["tenant"] == "alice"), None)

    deadline_s = time.monotonic() + DEADLINE_S
    while used() != (1, 20):
        assert time.monotonic() < deadline_s, used()
        time.sleep(0.1)


def test_an_answer_goes_on_at_the_other_host(servers: tuple[SplitServer, Host, httpx.Client]) -> None:
    """Its gateway is killed while it streams."""
    server, host, http = servers
    headers, body = {"Idempotency-Key": "over"}, BODY | {"max_tokens": 200, "stream": True, "return_token_ids": True}
    tokens, last = list[int](), ""
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        data, lines = "", response.iter_lines()
        with suppress(httpx.HTTPError):
            for line in lines:
                data = line if line.startswith("data: {") else data
                last = line.removeprefix("id: ") if line.startswith("id: ") else last
                if not line:
                    tokens += json.loads(data.removeprefix("data: "))["choices"][0].get("token_ids", [])
                    if len(tokens) == 10:
                        os.kill(host.child("gateway"), signal.SIGKILL)
    assert 10 <= len(tokens) < 200
    alice = dict(http.headers)["authorization"]
    rest = server.http.post(
        "/v1/completions", json=body, headers=headers | {"Last-Event-ID": last, "Authorization": alice}
    ).text
    for line in rest.split("\n"):
        if line.startswith("data: {"):
            tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids", [])
    assert tokens == expected(BODY | {"max_tokens": 200})[0]
    server.wait(lambda pools: len(pools["gateways"]) == 2)


def test_the_servers_limits_hold_there(servers: tuple[SplitServer, Host, httpx.Client]) -> None:
    """Requests of one tenant are counted together."""
    server, _, http = servers
    alice = {"Authorization": http.headers["authorization"]}
    found = []
    for number in range(40):
        client, more = (http, {}) if number % 2 else (server.http, alice)
        found.append(client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=more).status_code)
    assert set(found) == {200, 429} and found.count(200) < 31


def test_without_keys_it_serves_its_own_machine_only(tmp_path: Path) -> None:
    options = ("--listen", "127.0.0.1:0", "--cache-gb", "0", "--prefill", "0", "--decode", "0")
    with split_server("fake", options=options, prefill=0, decode=0, num_workers=0) as server:
        words = [*join_line(server), "--role", "gateway", "--host", "0.0.0.0", "--port", "0"]
        with joined(words, wait=False) as host:
            host.process.wait(DEADLINE_S)
            assert host.over.wait(DEADLINE_S)
            assert "there are no API keys" in "\n".join(host.log), host.log
            assert host.process.returncode == 2
