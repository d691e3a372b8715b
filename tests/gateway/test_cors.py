"""CORS: which pages may use the server from a browser, and that no other check is weaker for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenants.serving import bearer, guarded_server, make_keys
from tripool.errors import InvalidRequest
from tripool.gateway.cors import checked_origins

PAGE, OTHER = "https://app.example.org", "https://other.example.org"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}
CROSS = {"Sec-Fetch-Site": "cross-site"}


def post(http: Any, origin: str, **headers: str) -> Any:
    return http.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin, **CROSS, **headers})


def test_a_named_page_uses_a_server_without_keys_and_no_other_does(serve):
    with serve(cors_origins=(PAGE,)) as served:
        allowed = served.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, PAGE)
        assert allowed.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"] and allowed.headers["vary"] == "Origin"
        answer = post(served.http, PAGE)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = served.http.options("/v1/chat/completions", headers={"Origin": OTHER, **PREFLIGHT})
        assert "access-control-allow-origin" not in refused.headers and refused.status_code != 204
        stranger = post(served.http, OTHER)
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (403, "other_site")
        assert "access-control-allow-origin" not in stranger.headers
        rebound = post(served.http, PAGE, Host="attacker.example.org")
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_refused")


def test_a_stream_and_an_error_can_be_read_by_the_page(serve):
    with serve(cors_origins=(PAGE,)) as served:
        for body, status in ((CHAT | {"stream": True}, 200), (CHAT | {"temperature": -1}, 400)):
            answer = served.http.post("/v1/chat/completions", json=body, headers={"Origin": PAGE, **CROSS})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_every_origin_is_none_on_a_server_without_keys(serve):
    with serve(cors_origins=("*",)) as served:
        assert post(served.http, OTHER).status_code == 403
        assert "access-control-allow-origin" not in served.http.get("/metrics", headers={"Origin": OTHER}).headers


@pytest.mark.parametrize("origins", [("*",), (PAGE,)])
def test_keys_are_still_needed(tmp_path: Path, origins: tuple[str, ...]):
    keys = make_keys(tmp_path / "keys.db", "alice")
    with guarded_server(tmp_path / "keys.db", cors_origins=origins) as running:
        assert running.http.options("/v1/models", headers={"Origin": PAGE, **PREFLIGHT}).status_code == 204
        without = post(running.http, PAGE)
        assert (without.status_code, without.headers["access-control-allow-origin"]) == (401, PAGE)
        answer = post(running.http, PAGE, **bearer(keys["alice"]))
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)


def test_a_server_that_names_no_origin_answers_none(server):
    answer = server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["null", "app.example.org", "https://a/b", "https://a b", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(InvalidRequest):
        checked_origins([origin])
    assert checked_origins(["HTTP://LOCALHOST:3000/"]) == ("http://localhost:3000",)
