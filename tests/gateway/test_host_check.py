"""A server without keys answers programs and its own machine, and no page of another site."""

from __future__ import annotations

import socket

import pytest

from tenants.serving import bearer, guarded_server, make_keys
from tripool.errors import TripoolError
from tripool.gateway.host_check import check_host, check_site
from tripool.gateway.refusals import HostRefused, OtherSite

OWN_NAME = "box"
EVERYWHERE = (
    "localhost", "LOCALHOST:8000", "app.localhost:8000", "127.0.0.1", "127.9.8.7:1", "[::1]:8000", "localhost.:8000",
    "box:8000", "box.local", "0.0.0.0:8000",
)  # fmt: skip
NOWHERE = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.",
    "localhost:8000@evil.example", "[e.vil]", "", "a.b", "xn--evl-zpa.example", "127.0.0.1, evil.example",
    "evil.example@localhost", "localhost#.evil.example", "localhost?.evil.example", "localhost/.evil.example",
    "localhost\\.evil.example", "localhost..", "localhost:80:80", "localhost:x", "localhost ", "[::1", "[::1]x",
    "[localhost]", "[::1%25evil.example]", ":8000", "local\xe9",
)  # fmt: skip
OTHER_ADDRESSES = ("10.0.0.7:8000", "8.8.8.8", "[fe80::1]", "tripool:8000", "tripool.svc.cluster.local", "gpu.internal")


def refused(host: str, reached_at: str) -> bool:
    try:
        check_host([(b"host", host.encode("latin-1"))], reached_at, OWN_NAME)
    except HostRefused:
        return True
    return False


@pytest.mark.parametrize("reached_at", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.7", "fe80::1%eth0"])
def test_names_of_this_machine_are_good_and_names_of_sites_are_not(reached_at):
    assert not [host for host in EVERYWHERE if refused(host, reached_at)]
    assert not [host for host in NOWHERE if not refused(host, reached_at)]


@pytest.mark.parametrize("host", OTHER_ADDRESSES)
def test_other_names_that_no_site_can_have_are_good_from_other_machines(host):
    assert not refused(host, "10.0.0.7")
    assert refused(host, "127.0.0.1")


def test_programs_may_leave_the_host_out_but_not_send_two():
    check_host([], "127.0.0.1", OWN_NAME)
    check_host([(b"host", b"evil.example")], "", OWN_NAME)  # a Unix socket: no name leads there
    with pytest.raises(HostRefused):
        check_host([(b"host", b"localhost"), (b"host", b"localhost")], "127.0.0.1", OWN_NAME)


FOREIGN = (
    {"origin": "http://evil.example"},
    {"origin": "http://localhost"},
    {"origin": "http://localhost:3000"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "ftp://evil.example"},
    {"origin": "file://"},
    {"origin": "localhost:8000"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": ""},
    {"origin": "", "sec-fetch-site": "cross-site"},
    {"origin": "chrome-extension://abc", "sec-fetch-site": "cross-site"},
    {"origin": "app://obsidian.md", "sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
)
OWN = (
    {},
    {"origin": "http://localhost:8000"},
    {"origin": "http://LocalHost:8000", "sec-fetch-site": "same-origin"},
    {"origin": "app://obsidian.md"},
    {"origin": "chrome-extension://abc", "sec-fetch-site": "none"},
    {"sec-fetch-site": "none"},
)


def pairs(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in ({"host": "localhost:8000"} | headers).items()]


@pytest.mark.parametrize("headers", FOREIGN)
def test_pages_of_other_sites(headers):
    with pytest.raises(OtherSite):
        check_site(pairs(headers))


def test_of_two_origins_both_count():
    both = pairs({"origin": "http://evil.example"}) + pairs({"origin": "http://localhost:8000"})[1:]
    for headers in (both, both[::-1]):
        with pytest.raises(OtherSite):
            check_site(headers)


@pytest.mark.parametrize("headers", OWN)
def test_programs_and_own_pages(headers):
    try:
        check_site(pairs(headers))
    except TripoolError as error:
        pytest.fail(str(error))


def test_a_rebound_name_reaches_nothing_of_an_open_server(server):
    for method, path in (("POST", "/drain"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/messages")):
        response = server.http.request(method, path, headers={"host": "evil.example"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "host_refused"), path
        assert "keys" in error["message"]
    assert server.http.get("/load").json()["draining"] is False
    assert server.http.get("/load", headers={"host": socket.gethostname()}).status_code == 200


def test_a_form_of_another_site_changes_nothing(server):
    """Without a preflight a page can post a form, with any of these types and no others."""
    for path in ("/drain", "/v1/models/unload", "/v1/chat/completions", "/tokenize"):
        for kind in ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain"):
            headers = {"origin": "http://evil.example", "content-type": kind}
            response = server.http.post(path, content=b"{}", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "other_site")
    assert server.http.get("/load").json()["draining"] is False


def test_probes_may_use_any_name_and_learn_nothing(tmp_path):
    """Load balancers call a server what they like. On one without keys the rest stays closed to such names."""
    with guarded_server(tmp_path / "keys.db") as opened:
        for path, reported in (
            ("/health", "status"),
            ("/ping", "status"),
            ("/health/ready", "status"),
            ("/version", "version"),
        ):
            answer = opened.http.get(path, headers={"host": "evil.example"})
            assert (answer.status_code, list(answer.json())) == (200, [reported])
        assert opened.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_keys_are_defence_enough(tmp_path):
    """Reverse proxies call a server by the name that it has outside."""
    key = bearer(make_keys(tmp_path / "keys.db", "alice")["alice"])
    outside = {"host": "llm.example.com", "origin": "https://app.example.com"}
    with guarded_server(tmp_path / "keys.db") as guarded:
        assert guarded.http.get("/health", headers=outside).status_code == 200
        assert guarded.http.get("/v1/models", headers=outside).status_code == 401
        assert guarded.http.get("/v1/models", headers=outside | key).status_code == 200
        assert guarded.http.post("/tokenize", headers=outside | key, json={"prompt": "a"}).status_code == 200
