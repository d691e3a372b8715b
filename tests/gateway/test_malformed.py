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
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/api/chat",
    "/api/generate",
    "/tokenize",
    "/detokenize",
)
HELLO: Any = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/api/chat": {"model": "fake", "messages": HELLO, "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "prompt": "a", "options": {"num_predict": 2}},
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
    | {"input", "instructions", "text", "reasoning", "include", "truncation", "previous_response_id", "store"}
    | {"options", "format", "think", "raw", "output_format", "thread"}
)


def send_strange_fields(served: Served, path: str, changes: dict[str, Any]) -> None:
    response = served.http.post(path, json=GOOD[path] | changes)
    assert response.status_code < 500, response.text
    check_words(path, response)


def check_words(path: str, response: Any) -> None:
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error if path.startswith("/api/") else error["message"]


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


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "x", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
ANSWER = {"type": "output_text", "text": "x", "annotations": []}
CUSTOM = {"type": "custom", "name": "g"}
FULL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "x"},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "stream_options": {"include_usage": True}, "stream": True, "thinking": {"type": "enabled"}, "max_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}
            ]},
        ],
        "system": [{"type": "text", "text": "x"}], "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "id": "m", "content": [ANSWER]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}, CUSTOM, {"type": "namespace", "name": "n", "tools": [CUSTOM]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"], "truncation": "auto", "max_output_tokens": 2, "metadata": {},
    },
    "/api/chat": {
        "model": "fake",
        "messages": [
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}], "format": SCHEMA, "think": "low", "stream": False,
        "options": {"num_predict": 2, "temperature": 0.5, "stop": ["x"], "num_ctx": 5},
    },
}  # fmt: skip


def places(value: object) -> Iterator[tuple[Any, Any]]:
    """Of every value inside: the list or object, and the index or key."""
    for key, inner in list(enumerate(value) if isinstance(value, list) else value.items()):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


def send_strange_values(served: Served, path: str, number: int, values: list[Any]) -> None:
    body = json.loads(json.dumps(FULL[path]))
    for value in values:
        inside = list(places(body))
        holder, key = inside[number % len(inside)]
        holder[key] = value
        number //= 3
    response = served.http.post(path, json=body)
    assert response.status_code < 500, (response.text, body)
    check_words(path, response)


strange = (st.sampled_from(sorted(FULL)), st.integers(0, 10**6), st.lists(anything, min_size=1, max_size=2))


@pytest.mark.parametrize("path", FULL)
def test_bodies_with_everything_are_served(server, path):
    assert server.http.post(path, json=FULL[path]).status_code == 200


@given(*strange)
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=UNFIT)
def test_any_value_anywhere(server, path, number, values):
    send_strange_values(server, path, number, values)


@pytest.mark.prove
@given(*strange)
@settings(max_examples=5000, deadline=None, suppress_health_check=UNFIT)
def test_any_value_anywhere_at_length(server, path, number, values):
    send_strange_values(server, path, number, values)
