"""Bytes that no good client sends, on a raw socket: never a 5xx, and nothing stays open in the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.serving import DEADLINE_S, ScriptedEngine, Served

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
HELLO: Any = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
UNFIT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
DEEP = b"[" * 50_000 + b"]" * 50_000


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(served.address, timeout=DEADLINE_S) as connection:
        yield connection


def head(path: str, *lines: str) -> bytes:
    kind = "content-type: application/json"
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", "connection: close", kind, *lines, "", ""]).encode()


def status_of(connection: socket.socket) -> int:
    """0 when the server hung up without an answer."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return int(received.split(b" ", 2)[1]) if received else 0


def still_serves(served: Served) -> None:
    for path in PATHS:
        assert served.http.post(path, json=GOOD[path]).status_code == 200
    assert served.engine.wait_idle()
    served.wait_empty()


def nested(field: str, path: str) -> bytes:
    good = json.dumps(GOOD[path] | {field: "@"}).encode()
    return good.replace(b'"@"', DEEP)


@pytest.mark.parametrize("path", PATHS)
def test_deep_nesting_and_huge_numbers(server, path):
    bodies = [DEEP, b'{"a":' * 10_000]
    fields = ("messages", "prompt", "tokens", "tools", "seed", "metadata", "user", "response_format", "system")
    for field in fields:
        bodies.append(nested(field, path))
        for number in (b"1e999", b"-" + b"9" * 4000, b"1" * 4299, b"1.5e-400", b"18446744073709551616"):
            bodies.append(json.dumps(GOOD[path] | {field: "@"}).encode().replace(b'"@"', number))
    for body in bodies:
        response = server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), (body[:80], response.text)
        if response.status_code == 200:  # only a field that is ignored may hold anything
            assert b'"user"' in body or b'"metadata"' in body or b'"seed"' in body, body[:80]
    still_serves(server)


@pytest.mark.parametrize("path", PATHS)
def test_invalid_utf8_and_half_surrogates(server, path):
    for field in ("prompt", "user", "model", "content"):
        for raw in (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800", b"\x00", b"\n"):
            body = b'{"' + field.encode() + b'": "' + raw + b'"}'
            response = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400, response.text
    still_serves(server)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_end_too_soon(server, path):
    body = json.dumps(GOOD[path]).encode()
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"
    for sent in (b"", chunk[:3], chunk[:10], chunk, chunk + b"0\r", b"zz\r\n", b"-5\r\n", b"ffffffffffffffffff\r\n"):
        with connected(server) as connection:
            connection.sendall(head(path, "transfer-encoding: chunked") + sent)
            connection.shutdown(socket.SHUT_WR)
            assert status_of(connection) < 500
    for length in ("5", str(len(body) + 1), "999999999", "-1", "x", "99999999999999999999999"):
        with connected(server) as connection:
            connection.sendall(head(path, f"content-length: {length}") + body[:-1])
            connection.shutdown(socket.SHUT_WR)
            assert status_of(connection) < 500
    still_serves(server)


def test_a_chunked_body_in_single_bytes_is_fine(server):
    path = "/v1/chat/completions"
    pieces = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in json.dumps(GOOD[path]).encode())
    with connected(server) as connection:
        connection.sendall(head(path, "transfer-encoding: chunked") + pieces + b"0\r\n\r\n")
        assert status_of(connection) == 200


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {"messages", "prompt", "tokens", "n", "stop", "seed", "stream", "tools", "tool_choice", "logit_bias", "system"}
    | {"response_format", "chat_template_kwargs", "max_tokens", "temperature", "thinking", "output_config", "echo"}
    | {"stop_sequences", "stream_options", "reasoning_effort", "cache_salt", "request_id", "guided_json", "logprobs"}
)


def send_strange_fields(served: Served, path: str, changes: dict[str, Any]) -> None:
    response = served.http.post(path, json=GOOD[path] | changes)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3))
@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=UNFIT)
def test_fields_of_any_type(server, path, changes):
    send_strange_fields(server, path, changes)


@pytest.mark.prove
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=5))
@settings(max_examples=5000, deadline=None, suppress_health_check=UNFIT)
def test_fields_of_any_type_at_length(server, path, changes):
    send_strange_fields(server, path, changes)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_hanging_up_at_any_point_frees(serve, path, stream):
    """In the request line, the headers, the body, before the first token, between tokens."""
    rng = Random(f"{path} {stream}")
    body = json.dumps(GOOD[path] | {"stream": stream, "max_tokens": 10**6}).encode()
    request = head(path, f"content-length: {len(body)}") + body
    with serve(engine=ScriptedEngine(" pool" * 100_000, context_tokens=10**9)) as served:
        for _ in range(25):
            with connected(served) as connection:
                connection.sendall(request[: rng.randint(1, len(request))])
        for num_bytes in (0, 1, 50, 500, 5000):
            with connected(served) as connection:
                connection.sendall(request)
                assert served.engine.wait_busy()
                received = 0
                while stream and received < num_bytes and (piece := connection.recv(4096)):
                    received += len(piece)
        assert served.engine.wait_idle()
        served.wait_empty()


def test_a_length_may_have_any_number_of_zeros_before_it(server):
    """Python reads no number of more than 4,300 digits."""
    path = "/tokenize"
    body = json.dumps(GOOD[path]).encode()
    for length, statuses in ((f"{len(body):05000}", (200, 400)), (f"{10**15:05000}", (400, 413)), ("0" * 5000, (400,))):
        with connected(server) as connection:
            connection.sendall(head(path, f"content-length: {length}") + body)
            assert status_of(connection) in statuses, length[-20:]
    still_serves(server)
