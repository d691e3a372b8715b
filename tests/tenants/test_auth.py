"""Access by key and route: real clients, a real server, a key store that changes while it runs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, AuthenticationError
from openai import AuthenticationError as OpenAIAuthenticationError
from openai import OpenAI

from tripool.gateway.auth import Guard
from tripool.tenants.key_store import KeyStore
from tripool.tenants.key_watcher import LOOK_S, STALE_S

from .serving import DEADLINE_S, Clock, Guarded, bearer, guarded_server, make_keys

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TENANT_POSTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/api/chat": {"model": "fake", "messages": CHAT["messages"], "options": {"num_predict": 4}},
    "/api/generate": {"model": "fake", "prompt": "Hello", "options": {"num_predict": 4}},
    "/api/show": {"model": "fake"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
}
OPERATOR = [
    ("GET", "/metrics"), ("GET", "/load"), ("GET", "/drain"), ("POST", "/drain"), ("DELETE", "/drain"),
    ("GET", "/v1/pools"), ("GET", "/v1/cache"), ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "/v1/models/load"),
    ("POST", "/v1/models/unload"), ("GET", "/no/such/route"), ("POST", "/v1/requests/x/explain"),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("book") / "keys.db"


@pytest.fixture(scope="module")
def keys(path: Path) -> dict[str, str]:
    return make_keys(path, "alice", "bob", "admin")


@pytest.fixture(scope="module")
def server(path: Path, keys: dict[str, str]) -> Iterator[Guarded]:
    with guarded_server(path) as running:
        yield running


@pytest.mark.parametrize("route", TENANT_POSTS)
def test_tenants_routes_want_a_key_and_take_it_in_both_dialects(
    server: Guarded, keys: dict[str, str], route: str
) -> None:
    body = TENANT_POSTS[route]
    for headers in (
        {},
        {"Authorization": "Bearer tp-wrong"},
        {"x-api-key": "tp-wrong"},
        {"Authorization": "Basic eA=="},
    ):
        refused = server.http.post(route, json=body, headers=headers | {"X-Request-Id": "mine"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"] == "mine"
        said = refused.json()
        if route.startswith("/api/"):
            assert isinstance(said["error"], str) and said["code"] == "invalid_api_key"
            continue
        if route.startswith("/v1/messages"):
            assert said["type"] == "error" and said["error"]["type"] == "authentication_error"
        else:
            assert said["error"]["type"] == "invalid_request_error"
        assert said["error"]["code"] == "invalid_api_key"
        assert "(" in said["error"]["message"], "a hint"
    for headers in (bearer(keys["alice"]), {"x-api-key": keys["alice"]}, {"authorization": f"bearer {keys['alice']}"}):
        assert server.http.post(route, json=body, headers=headers).status_code == 200


def test_anyone_may_ask_whether_it_is_alive(server: Guarded) -> None:
    for route in ("/health", "/ping", "/health/ready", "/version"):
        assert server.http.get(route).status_code == 200


@pytest.mark.parametrize(("method", "route"), OPERATOR)
def test_the_rest_is_the_operators(server: Guarded, keys: dict[str, str], method: str, route: str) -> None:
    assert server.http.request(method, route).status_code == 401
    refused = server.http.request(method, route, headers=bearer(keys["alice"]))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_needed"
    let_in = server.http.request(method, route, headers=bearer(keys["admin"]))
    assert let_in.status_code not in (401, 403), let_in.text
    server.http.delete("/drain", headers=bearer(keys["admin"])).raise_for_status()


def test_models_are_shown_to_every_key(server: Guarded, keys: dict[str, str]) -> None:
    for route in ("/v1/models", "/v1/models/fake", "/api/tags", "/api/ps", "/api/version"):
        assert server.http.get(route).status_code == 401
        assert server.http.get(route, headers=bearer(keys["bob"])).status_code == 200


def test_the_usual_clients_understand_the_refusal(server: Guarded, keys: dict[str, str]) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="tp-wrong", max_retries=0) as openai:
        with pytest.raises(OpenAIAuthenticationError, match="unknown, revoked or expired"):
            openai.models.list()
        assert openai.with_options(api_key=keys["alice"]).models.list().data[0].id == "fake"
    with Anthropic(base_url=server.url, api_key="tp-wrong", max_retries=0) as anthropic:
        with pytest.raises(AuthenticationError, match="unknown, revoked or expired"):
            anthropic.messages.create(model="fake", max_tokens=4, messages=[{"role": "user", "content": "x"}])
        known = anthropic.with_options(api_key=keys["alice"])
        assert known.messages.create(model="fake", max_tokens=4, messages=[{"role": "user", "content": "x"}]).usage


def test_tenants_see_only_their_own_requests(server: Guarded, keys: dict[str, str]) -> None:
    def say(name: str) -> int:
        body = CHAT | {"request_id": "same"}
        answer = server.http.post("/v1/chat/completions", json=body, headers=bearer(keys[name])).raise_for_status()
        tokens: int = answer.json()["usage"]["prompt_tokens"]
        return tokens

    def explained(name: str, request: str) -> httpx.Response:
        return server.http.get(f"/v1/requests/{request}/explain", headers=bearer(keys[name]))

    say("alice")
    assert explained("alice", "same").status_code == 200
    assert explained("bob", "same").status_code == 404
    assert explained("bob", "chatcmpl-same").status_code == 404
    created = explained("alice", "same").json()
    say("bob")
    assert explained("alice", "same").json()["prompt_tokens"] == created["prompt_tokens"], "hidden by another's name"
    assert explained("bob", "same").status_code == explained("admin", "same").status_code == 200


def test_keys_come_and_go_while_it_runs(tmp_path: Path) -> None:
    path, watch, wall = tmp_path / "keys.db", Clock(), Clock(time.time())
    with guarded_server(path, watch_clock=watch, wall_clock=wall) as server:
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200, "no keys: open"
        assert server.http.get("/metrics").status_code == 200
        with KeyStore(path, create=True) as key_store:
            key = key_store.add_key("alice", now_s=wall.now_s, expires_s=wall.now_s + 60)
            other = key_store.add_key("alice", now_s=wall.now_s)
            watch.now_s += LOOK_S
            assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 401
            for good in (key, other):
                assert server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(good)).status_code == 200
            wall.now_s += 60
            assert server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(key)).status_code == 401
            assert server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(other)).status_code == 200
            key_store.revoke("alice", now_s=wall.now_s)
            watch.now_s += LOOK_S
            assert server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(other)).status_code == 401
        path.unlink()
        watch.now_s += STALE_S + 1
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 503, (
            "a lost key store does not open the server"
        )
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 503
        KeyStore(path, create=True).close()  # or its end would complain of usage that it cannot write


def test_a_refused_body_is_not_read(server: Guarded) -> None:
    """A stranger cannot make the server hold megabytes: the answer comes before the body does."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n{")
        assert line.recv(100).startswith(b"HTTP/1.1 401")


def test_nothing_but_http_reaches_the_application(server: Guarded) -> None:
    """There are no websockets; one that is added later is not open by oversight."""
    reached, sent = list[str](), list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(app, server.access, lambda code: None)
    asyncio.run(guard({"type": "websocket", "path": "/health", "headers": []}, None, send))  # type: ignore[arg-type]
    assert not reached and sent == [{"type": "websocket.close", "code": 1008}]
    asyncio.run(guard({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert reached == ["lifespan"]
