"""One tenant's connections, or strangers', do not shut out the others, and never a health check."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gateway.serving import DEADLINE_S, GatedEngine
from gateway.test_connection import CHAT, HELLO, code_of, connected, post, read_all, read_answer
from tenants.serving import Guarded, bearer, guarded_server, make_keys
from tripool.gateway.connection_limits import ConnectionLimits

MANY = ConnectionLimits(max_open=32)
STREAM = {"messages": HELLO, "max_tokens": 5, "stream": True}


@contextmanager
def keyed(path: Path) -> Iterator[tuple[Guarded, dict[str, str], GatedEngine]]:
    keys, engine = make_keys(path, "alice", "bob", "admin"), GatedEngine()
    with guarded_server(path, engine=engine, limits=MANY) as served:
        try:
            yield served, keys, engine
        finally:
            engine.in_flight.set()


def address_of(served: Guarded) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def healthy(served: Guarded) -> None:
    for path in ("/health", "/ping", "/health/ready", "/version"):
        assert served.http.get(path).status_code == 200


def test_one_tenant_cannot_take_all_connections(tmp_path):
    with keyed(tmp_path / "keys.db") as (served, keys, engine), ExitStack() as open_lines:
        lines = []
        for _ in range(40):  # more than there may be
            line = open_lines.enter_context(socket.create_connection(address_of(served), DEADLINE_S))
            line.sendall(post(CHAT, STREAM, f"authorization: Bearer {keys['alice']}"))
            lines.append(line)
            healthy(served)
        for _ in range(3):
            assert served.http.get("/v1/models", headers=bearer(keys["bob"])).status_code == 200
        refused = [read_all(line) for line in lines[7:]]  # a quarter of seven eighths
        assert {answer.split(b" ", 2)[1] for answer in refused} == {b"429"}
        assert {code_of(answer) for answer in refused} == {"tenant_connections"}
        assert all(b"connection: close" in answer and b"retry-after: 1" in answer for answer in refused)
        with connected_to(served) as line:
            line.sendall(post(CHAT, STREAM, f"authorization: Bearer {keys['bob']}", "connection: close"))
            engine.in_flight.set()
            assert read_all(line).startswith(b"HTTP/1.1 200 ")
            for kept in lines[:7]:
                assert kept.recv(12) == b"HTTP/1.1 200"
        served.wait_empty(keys["admin"])
        reported = served.http.get("/metrics", headers=bearer(keys["admin"])).text
        assert 'code="tenant_connections"' in reported
        assert served.http.post(CHAT, json=STREAM, headers=bearer(keys["alice"])).status_code == 200, "it is free again"


@contextmanager
def connected_to(served: Guarded) -> Iterator[socket.socket]:
    with socket.create_connection(address_of(served), DEADLINE_S) as line:
        yield line


def test_a_refused_request_may_send_its_body_to_the_end(tmp_path):
    """Hanging up on it would take the answer away."""
    with keyed(tmp_path / "keys.db") as (served, keys, _), ExitStack() as open_lines:
        key = f"authorization: Bearer {keys['alice']}"
        for _ in range(7):
            line = open_lines.enter_context(connected_to(served))
            line.sendall(post(CHAT, STREAM, key))
        healthy(served)
        with connected_to(served) as line:
            request = post(CHAT, STREAM | {"user": "x" * 500_000}, key)
            line.sendall(request[:1000])
            answer = read_answer(line)
            assert (answer.split(b" ", 2)[1], code_of(answer)) == (b"429", "tenant_connections")
            line.sendall(request[1000:])
            line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert read_answer(line).startswith(b"HTTP/1.1 200 ")


def test_idle_connections_make_room(tmp_path):
    """A tenant that keeps as many open as there may be, and uses each now and then, must not keep others out."""
    with keyed(tmp_path / "keys.db") as (served, keys, _), ExitStack() as open_lines:
        for _ in range(32):
            line = open_lines.enter_context(connected_to(served))
            line.sendall(
                f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {keys['alice']}\r\n\r\n".encode()
            )
            assert read_answer(line).startswith(b"HTTP/1.1 200 ")
        healthy(served)
        assert served.http.get("/v1/models", headers=bearer(keys["bob"])).status_code == 200


@pytest.mark.parametrize("whole", [False, True])
def test_a_server_without_keys_always_answers_health_checks(serve, whole):
    """Its users are one tenant to it, and may take all but a reserve; half a body claims nothing for long."""
    engine = GatedEngine()
    with serve(engine=engine, limits=MANY) as served, ExitStack() as open_lines:
        for number in range(40):
            line = open_lines.enter_context(connected(served))
            request = post(CHAT, STREAM)
            line.sendall(request if whole else request[:-1])
            assert served.http.get("/health").status_code == 200  # and by then it was read
            if not whole or number < 28:
                continue
            answer = read_all(line)
            assert answer.startswith(b"HTTP/1.1 503 ") and code_of(answer) == "too_many_connections"
        for path in ("/health", "/ping", "/health/ready", "/version"):
            assert served.http.get(path).status_code == 200
        models = served.http.get("/v1/models")
        assert models.status_code == (503 if whole else 200), json.dumps(models.json())
        engine.in_flight.set()
    assert engine.wait_idle()
